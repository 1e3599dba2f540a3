"""Plain safetensors files of a step's tensors, for others to read, without holding any tensor whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unidist.checkpoint import disk
from unidist.checkpoint.folders import Step
from unidist.checkpoint.manifest import INDEX, index_of
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.tensors import LARGEST, FileSpec, files_of
from unidist.errors import CheckpointError

_PIECE = 16 << 20


def export(
    directory: str | Path,
    out: str | Path,
    step: Step = "latest",
    *,
    kinds: Sequence[str] = ("model",),
    largest: int = LARGEST,
) -> list[str]:
    """Writes tensors of a step into plain safetensors files, and Hugging Face's index of the model's.

    Args:
        directory: of the checkpoints, or a step's folder.
        out: a folder, which is empty or not there yet.
        step: its number, or "latest".
        kinds: of the tensors.
        largest: bytes of a file at most, unless one tensor alone has more.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: what is read is damaged, or the system cannot write.
    """
    target = Path(out)
    with Reader(directory, step) as reader:
        held = [tensor for tensor in reader.tensors.values() if tensor.kind in kinds]
        files = files_of(held, largest, has_stamp=False)
        with disk.told(target):
            target.mkdir(parents=True, exist_ok=True)
            if os.listdir(target):
                raise CheckpointError(f"{target}: is not empty", file=str(target))
        for file in files:
            _copy(reader, file, target)
    disk.write_durably(target, INDEX, index_of(files))
    return [*(file.name for file in files), INDEX]


def _copy(reader: Reader, spec: FileSpec, target: Path) -> None:
    path, half = target / spec.name, target / f"{spec.name}.half"
    with disk.told(path):
        with half.open("xb") as file:
            file.write(spec.header)
            for name, tensor in spec.tensors.items():
                for begin in range(0, tensor.nbytes, _PIECE):
                    file.write(reader.read_bytes(name, begin, min(_PIECE, tensor.nbytes - begin)).data)
            file.flush()
            os.fsync(file.fileno())
        half.rename(path)
