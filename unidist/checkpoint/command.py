"""`unidist checkpoint`: lists checkpoints, verifies that one is whole, compares two, exports one.

Plain safetensors files of a step's tensors are for others to read; no tensor is held whole. Numbers are compared in
dtypes that NumPy lacks too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint import disk
from unidist.checkpoint.checksums import Bytes
from unidist.checkpoint.directory import Step
from unidist.checkpoint.manifest import INDEX, MANIFEST, index_of
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.remote import directory_of
from unidist.checkpoint.stores import is_address
from unidist.checkpoint.tensors import KINDS, LARGEST, FileSpec, Tensor, files_of
from unidist.errors import CheckpointError
from unidist.tables import table

# A multiple of every item's bytes; of each step so many are held at once, and some times as many as wider numbers.
_PIECE = 1 << 20
# Bytes that are copied at once into a plain file.
_COPIED = 16 << 20
_OUT = "a folder that is empty or not there yet; or NAME.keras, or NAME.weights.h5, which Keras writes"
# A model's config and random states have thousands of letters.
_MOST_SHOWN = 80


def main(arguments: Sequence[str], by_keras: Callable[[str, Step, Path], None]) -> int:
    """Does what is asked.

    Args:
        arguments: of the command.
        by_keras: exports a step of a directory into a file of Keras's own.

    Returns:
        0; 1 where `verify` finds damage or `diff` a difference.

    Raises:
        CheckpointError: there is no such checkpoint, or what is to be read is damaged.
    """
    options = _options(arguments)
    if options.what == "list":
        return _list(options.directory)
    if options.what == "show":
        return _show(options.directory, options.step)
    if options.what == "verify":
        return _verify(options.directory, options.step)
    if options.what == "diff":
        return _diff((options.left, options.left_step), (options.right, options.right_step))
    if options.out.suffix in (".keras", ".h5"):
        by_keras(options.directory, options.step, options.out)
        print(options.out)
    else:
        kinds = KINDS if options.all else ("model",)
        for name in export(options.directory, options.out, options.step, kinds=kinds, largest=options.largest):
            print(options.out / name)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unidist checkpoint",
        description="Exit code 0: all is well. 1: damage is found, or a difference. 2: there is no such checkpoint. "
        "DIR is a directory of checkpoints, or the folder of one step.",
    )
    subparsers = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    for name, summary in (
        ("list", "The steps of a directory"),
        ("show", "The tensors of a step, who wrote them, and what was noted"),
        ("verify", "Read every byte of a step and compare checksums"),
        ("export", "Write a step's tensors as plain safetensors files, or as a file of Keras's own"),
    ):
        sub = subparsers.add_parser(name, help=summary, description=summary)
        sub.add_argument("directory", metavar="DIR")
        if name != "list":
            sub.add_argument("--step", type=_step, default="latest", help="its number (default: the latest)")
        if name == "export":
            sub.add_argument("out", metavar="OUT", type=Path, help=_OUT)
            sub.add_argument("--all", action="store_true", help="also of optimizer, state and layers' files")
            sub.add_argument("--largest", type=int, default=LARGEST, help=f"bytes of a file (default: {LARGEST})")
    summary = "Compare names, shapes, dtypes and values of two steps"
    diff = subparsers.add_parser("diff", help=summary, description=summary)
    for side in ("left", "right"):
        diff.add_argument(side, metavar=side[0].upper())
        diff.add_argument(f"--{side}-step", type=_step, default="latest", help="its number (default: the latest)")
    return parser.parse_args(list(arguments))


def _step(text: str) -> Step:
    return "latest" if text == "latest" else int(text)


def _list(directory: str) -> int:
    if not is_address(directory) and not Path(directory).is_dir():
        raise CheckpointError(f"{directory}: there is no such directory", file=directory)
    rows, found = [("step", "written", "size", "tensors", "")], directory_of(directory)
    for step in found.steps():
        where, written = found.find(step), "-"
        if isinstance(where, Path):
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime((where / MANIFEST).stat().st_mtime))
        try:
            with Reader(directory, step, "off") as reader:
                total = sum(tensor.nbytes for tensor in reader.tensors.values())
                rows.append((str(step), written, _size(total), str(len(reader.tensors)), ""))
        except CheckpointError as error:
            rows.append((str(step), written, "-", "-", str(error)))
    if len(rows) == 1:
        print(f"no checkpoint in {directory}")
        return 0
    print(table(rows))
    return 0


def _show(directory: str, step: Step) -> int:
    with Reader(directory, step) as reader:
        print(f"step {reader.step} in {reader.folder}")
        rows = [("tensor", "kind", "dtype", "shape", "size", "written by")]
        for name, tensor in reader.tensors.items():
            by = ", ".join(map(str, reader.written_by(name))) or "-"
            rows.append((name, tensor.kind, tensor.dtype, _shape(tensor), _size(tensor.nbytes), by))
        print(table(rows))
        total = sum(tensor.nbytes for tensor in reader.tensors.values())
        print(f"{len(reader.tensors)} tensors, {_size(total)}")
        print()
        print(table([("noted", "value"), *_noted(reader.facts)]))
    return 0


def _noted(facts: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields a row for each fact: its keys, and the value; of long ones how long they are.

    What is empty is left out.
    """
    if isinstance(facts, Mapping):
        for key, value in facts.items():
            yield from _noted(value, (*path, str(key)))
    elif facts not in (None, "", []):
        text = facts if isinstance(facts, str) else json.dumps(facts)
        is_long, of = len(text) > _MOST_SHOWN, "letters" if isinstance(facts, str) else "values"
        yield ".".join(path), f"{len(facts):,} {of}" if is_long else text


def _verify(directory: str, step: Step) -> int:
    where = directory_of(directory).find(step)
    try:
        with Reader(directory, step, "all") as reader:
            total = sum(tensor.nbytes for tensor in reader.tensors.values())
            print(f"step {reader.step}: {len(reader.tensors)} tensors, {_size(total)}: all as it was written")
    except CheckpointError as error:
        print(f"{where}: {error}")
        return 1
    return 0


def _diff(left: tuple[str, Step], right: tuple[str, Step]) -> int:
    with Reader(*left) as a, Reader(*right) as b:
        names = sorted({*a.tensors, *b.tensors})
        said = [text for name in names if (text := _difference(name, a, b))]
    for text in said:
        print(text)
    print(f"{len(said)} of {len(names)} tensors differ" if said else f"{len(names)} tensors, the same in both")
    return 1 if said else 0


def _difference(name: str, a: Reader, b: Reader) -> str:
    here, there = a.tensors.get(name), b.tensors.get(name)
    if here is None or there is None:
        return f"{name}: only in {(a if there is None else b).folder}"
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        return f"{name}: {here.dtype} {_shape(here)} and {there.dtype} {_shape(there)}"
    most, differs = 0.0, False
    for begin in range(0, here.nbytes, _PIECE):
        count = min(_PIECE, here.nbytes - begin)
        left, right = a.read_bytes(name, begin, count), b.read_bytes(name, begin, count)
        if left.tobytes() != right.tobytes():
            found = difference(left, right, here.dtype)
            most, differs = found if math.isnan(found) else max(found, most), True
        if math.isnan(most):
            break
    return f"{name}: values differ by up to {most:g}" if differs else ""


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    power = min((len(str(nbytes)) - 1) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {'kMGT'[power - 1]}B"


# plain files ----------------------------------------------------------------------------------------------------------


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
            disk.write_whole(target, file.name, _content(reader, file), is_kept=True)
    disk.write_durably(target, INDEX, index_of(files))
    return [*(file.name for file in files), INDEX]


def _content(reader: Reader, spec: FileSpec) -> Iterator[bytes | memoryview]:
    yield spec.header
    for name, tensor in spec.tensors.items():
        for begin in range(0, tensor.nbytes, _COPIED):
            yield reader.read_bytes(name, begin, min(_COPIED, tensor.nbytes - begin)).data


# numbers --------------------------------------------------------------------------------------------------------------


def numbers(data: Bytes, dtype: str) -> NDArray[Any]:
    """Bytes as numbers of NumPy: those of a dtype that it lacks as wider ones, exactly."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":
        return (data.astype(np.uint16) << 8).view(np.float16)
    if dtype == "float8_e4m3fn":
        # Its exponent is smaller than that of float16, by eight, and its largest one has numbers too, but for the last.
        low = data.astype(np.uint16) & 0x7F
        value = ((data & np.uint16(0x80)) << 8 | low << 7).view(np.float16) * np.float32(2**8)
        return np.where(low == 0x7F, np.float32("nan"), value)
    return data.view(dtype)


def difference(left: Bytes, right: Bytes, dtype: str) -> float:
    """The largest distance of two numbers in the same place; NaN where only one of them is."""
    if not len(left) or np.array_equal(left, right):
        return 0.0
    a, b = numbers(left, dtype), numbers(right, dtype)
    if a.dtype.kind in "iu":
        wide = np.uint64 if a.dtype == np.uint64 else np.int64
        a, b = a.astype(wide), b.astype(wide)
        # Of two's complements: the difference of the farthest does not fit into an int64.
        return float((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).max())
    wide_float = np.complex128 if a.dtype.kind == "c" else np.float64
    # What is no number stays none, of whatever kind.
    with np.errstate(invalid="ignore"):
        a, b = a.astype(wide_float), b.astype(wide_float)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a - b)
    # Infinities of one sign are none apart.
    distance[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    return float(distance.max())
