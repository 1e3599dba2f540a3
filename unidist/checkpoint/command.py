"""`unidist checkpoint`: lists a directory's checkpoints, verifies that one is whole, compares two."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unidist.checkpoint import folders, manifest, remote
from unidist.checkpoint.exporting import export
from unidist.checkpoint.folders import Step
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.stores import is_address
from unidist.checkpoint.tensors import KINDS, LARGEST, Tensor
from unidist.checkpoint.values import difference
from unidist.errors import CheckpointError
from unidist.tables import table

# A multiple of every item's bytes; of each step so many are held at once, and some times as many as wider numbers.
_PIECE = 1 << 20
_OUT = "a folder that is empty or not there yet; or NAME.keras, or NAME.weights.h5, which Keras writes"
# A model's config has thousands of letters.
_MOST_SHOWN = 300


def main(arguments: Sequence[str], by_keras: Callable[[Path, Step, Path], None]) -> int:
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
        sub.add_argument("directory", metavar="DIR", type=_directory)
        if name != "list":
            sub.add_argument("--step", type=_step, default="latest", help="its number (default: the latest)")
        if name == "export":
            sub.add_argument("out", metavar="OUT", type=Path, help=_OUT)
            sub.add_argument("--all", action="store_true", help="also of optimizer, state and layers' files")
            sub.add_argument("--largest", type=int, default=LARGEST, help=f"bytes of a file (default: {LARGEST})")
    summary = "Compare names, shapes, dtypes and values of two steps"
    diff = subparsers.add_parser("diff", help=summary, description=summary)
    for side in ("left", "right"):
        diff.add_argument(side, metavar=side[0].upper(), type=_directory)
        diff.add_argument(f"--{side}-step", type=_step, default="latest", help="its number (default: the latest)")
    return parser.parse_args(list(arguments))


def _directory(text: str) -> Path | str:
    return text if is_address(text) else Path(text)


def _step(text: str) -> Step:
    return "latest" if text == "latest" else int(text)


def _list(directory: Path | str) -> int:
    if isinstance(directory, Path) and not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory", file=str(directory))
    rows = [("step", "written", "size", "tensors", "")]
    for step in folders.steps(directory) if isinstance(directory, Path) else remote.steps(directory):
        written = "-"
        if isinstance(directory, Path):
            told = folders.step_folder(directory, step) / manifest.MANIFEST
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(told.stat().st_mtime))
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


def _show(directory: Path | str, step: Step) -> int:
    with Reader(directory, step) as reader:
        print(f"step {reader.step} in {reader.folder}")
        rows = [("tensor", "kind", "dtype", "shape", "size", "written by")]
        for name, tensor in reader.tensors.items():
            by = ", ".join(map(str, reader.written_by(name))) or "-"
            rows.append((name, tensor.kind, tensor.dtype, _shape(tensor), _size(tensor.nbytes), by))
        print(table(rows))
        total = sum(tensor.nbytes for tensor in reader.tensors.values())
        print(f"{len(reader.tensors)} tensors, {_size(total)}")
        print(f"noted: {json.dumps(_shortened(reader.facts), indent=1)}")
    return 0


def _shortened(facts: Any) -> Any:
    if isinstance(facts, Mapping):
        return {key: _shortened(value) for key, value in facts.items()}
    is_long = isinstance(facts, str) and len(facts) > _MOST_SHOWN
    return f"{facts[:_MOST_SHOWN]}... ({len(facts)} letters)" if is_long else facts


def _verify(directory: Path | str, step: Step) -> int:
    where = folders.find(directory, step) if isinstance(directory, Path) else remote.address_of(directory, step)
    try:
        with Reader(directory, step, "all") as reader:
            total = sum(tensor.nbytes for tensor in reader.tensors.values())
            print(f"step {reader.step}: {len(reader.tensors)} tensors, {_size(total)}: all as it was written")
    except CheckpointError as error:
        print(f"{where}: {error}")
        return 1
    return 0


def _diff(left: tuple[Path | str, Step], right: tuple[Path | str, Step]) -> int:
    with Reader(*left) as a, Reader(*right) as b:
        names = sorted({*a.tensors, *b.tensors})
        said = [text for name in names if (text := _difference(name, a, b))]
    for text in said:
        print(text)
    print(f"{len(said)} of {len(names)} tensors differ" if said else f"{len(names)} tensors, the same in both")
    return 1 if said else 0


def _difference(name: str, a: Reader, b: Reader) -> str:
    """Returns how a tensor differs; "" where it does not."""
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
