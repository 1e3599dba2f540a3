"""Checkpoints for tests: tensors of every kind, their bytes, and how processes share the writing of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint.folders import FolderDirectory, FolderWriter
from unidist.checkpoint.tensors import DTYPES, LARGEST, FileSpec, Tensor, files_of

# Where a test writes many steps: waiting for the disk is not what it tests.
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
Bytes = NDArray[np.uint8]


def tensors() -> list[Tensor]:
    """One of each dtype, empty ones and a scalar, of each kind."""
    many = [Tensor(f"layer/{dtype}", dtype, (3, 5, 7), "model") for dtype in DTYPES]
    return [
        *many,
        Tensor("dense/kernel", "float32", (64, 96), "model"),
        Tensor("dense/bias", "float32", (96,), "model"),
        Tensor("adam/dense_kernel_momentum", "float32", (64, 96), "optimizer"),
        Tensor("adam/iteration", "int64", (), "optimizer"),
        Tensor("metrics/mean/total", "float32", (), "state"),
        Tensor("empty", "float32", (0, 4), "state"),
        Tensor('odd "name" \\ é\n', "uint8", (9,), "state"),
    ]


def contents(of: Sequence[Tensor], seed: int = 0) -> dict[str, Bytes]:
    """Bytes for each tensor. Booleans are 0 and 1."""
    draw = np.random.default_rng(seed)
    return {t.name: draw.integers(0, 2 if t.dtype == "bool" else 256, t.nbytes, np.uint8) for t in of}


def known(step: int) -> dict[str, Bytes]:
    """What a step has that a program wrote which is killed."""
    return contents(tensors(), step)


def prepare(directory: Path, step: int, files: Sequence[FileSpec]) -> Path:
    """The folder that processes write into."""
    return directory / FolderDirectory(directory).prepare(step, files)


def writer(folder: Path, files: Sequence[FileSpec], place: int) -> FolderWriter:
    return FolderDirectory(folder.parent).writer(folder.name, files, place)


def commit(folder: Path, files: Sequence[FileSpec], facts: Mapping[str, Any], places: int) -> Path:
    return Path(FolderDirectory(folder.parent).commit(folder.name, files, facts, places))


def write(
    directory: Path,
    step: int,
    bytes_of: Mapping[str, Bytes],
    of: Sequence[Tensor],
    *,
    places: int = 1,
    cuts: Mapping[str, Sequence[int]] | None = None,
    largest: int = LARGEST,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Writes and commits a step. `cuts`: where a tensor's ranges end, which the places write in turn."""
    files = files_of(of, largest)
    folder = prepare(directory, step, files)
    for place in range(places):
        with writer(folder, files, place) as part:
            _write_part(part, place, places, bytes_of, cuts or {})
            part.finish()
    return commit(folder, files, facts or {"step": step}, places)


def _write_part(
    part: FolderWriter, place: int, places: int, bytes_of: Mapping[str, Bytes], cuts: Mapping[str, Sequence[int]]
) -> None:
    for number, (name, data) in enumerate(bytes_of.items()):
        bounds = [0, *cuts.get(name, ()), len(data)]
        for k, (begin, end) in enumerate(pairwise(bounds)):
            if (number + k) % places == place:
                part.write(name, begin, data[begin:end])


def region_of(data: Bytes, tensor: Tensor, region: Sequence[tuple[int, int]]) -> Bytes:
    """What NumPy makes of a region: the reference."""
    items = data.reshape(*tensor.shape, tensor.itemsize)
    return items[tuple(slice(first, first + n) for first, n in region)].reshape(-1)


def spec_of(files: Sequence[FileSpec], name: str) -> FileSpec:
    """The file that has a tensor."""
    return next(file for file in files if name in file.tensors)
