"""The files beside the tensors': checksums, Hugging Face's index, and the manifest.

By the manifest a step counts.

The manifest is JSON. Its first key is the CRC32C of all of its bytes, counted with zeros in the place of its own eight
digits. `files` has each file of tensors with its size and its header's length and CRC32C; `checksums` and `index` have
the other two files'.

The checksums are a plain safetensors file of four tensors:

- `unidist/firsts` (I64, tensors + 1 rows): where a tensor's ranges and its checksums begin in the other three, in the
  order of the files and of the tensors in them.
- `unidist/begins` (I64): where each range begins in its tensor. It ends where the next one begins, or with the tensor.
- `unidist/places` (U32): who wrote it.
- `unidist/crc32c` (U32): of each block of a range, from its first byte on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unidist.checkpoint.checksums import crc
from unidist.checkpoint.tensors import LARGEST_TEXT, FileSpec, Tensor, file_of, parse_json
from unidist.errors import CheckpointError

CHECKSUMS = "checksums.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
FIRSTS, BEGINS, PLACES, SUMS = (f"unidist/{name}" for name in ("firsts", "begins", "places", "crc32c"))
VERSION = 1
# Of one tensor: so much is held of it while it is read.
MOST_RANGES = 1 << 24
_FORMAT = "unidist checkpoint"
_HEAD = b'{\n "crc32c": "'


@dataclass(frozen=True, slots=True)
class Told:
    """Holds what the manifest says of a file: its size; length and CRC32C of its header, or of all of it."""

    name: str
    size: int
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest, which makes a step count.

    Attributes:
        step: its number.
        writing: drawn by chance for each time that a step is written.
        files: those of tensors, in order.
        checksums, index: the two beside them.
        facts: of whoever wrote it.
        tensors: where files hold parts of tensors, one file a process: all tensors, in order.
        folder: of the files, where the manifest is beside it.
    """

    step: int
    writing: str
    files: tuple[Told, ...]
    checksums: Told
    index: Told
    facts: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()
    folder: str = ""


def text_of(manifest: Manifest) -> bytes:
    """The manifest's file.

    Raises:
        CheckpointError: facts that are no JSON, or too many.
    """
    content: dict[str, object] = {
        "crc32c": "0" * 8,
        "format": _FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "writing": manifest.writing,
        "files": [asdict(file) for file in manifest.files],
        "checksums": asdict(manifest.checksums),
        "index": asdict(manifest.index),
        "facts": manifest.facts,
    }
    if manifest.folder:
        content["folder"] = manifest.folder
        content["tensors"] = [[one.name, one.dtype, list(one.shape), one.kind] for one in manifest.tensors]
    try:
        text = json.dumps(content, allow_nan=False, indent=1).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST}: the facts are no JSON: {error}", file=MANIFEST) from error
    if len(text) > LARGEST_TEXT:
        raise CheckpointError(f"{MANIFEST}: would have {len(text)} bytes; {LARGEST_TEXT} is the most", file=MANIFEST)
    return _with(text, crc(text))


def _with(text: bytes, number: int) -> bytes:
    return text[: len(_HEAD)] + b"%08x" % number + text[len(_HEAD) + 8 :]


def parsed(text: bytes, step: int | None = None) -> Manifest:
    """A manifest that anybody may have written.

    Args:
        text: of its file.
        step: whose it is by its place, if that says so.

    Raises:
        CheckpointError: it is damaged, is none, or is another step's.
    """
    if not text.startswith(_HEAD) or text != _with(text, crc(_with(text, 0))):
        # Without JSON there is more to say than that it is not what was written.
        parse_json(text, MANIFEST)
        raise CheckpointError(f"{MANIFEST}: is damaged: its checksum differs", file=MANIFEST)
    found = parse_json(text, MANIFEST)
    match found:
        case {
            "format": str() as form,
            "version": int() as version,
            "step": int() as number,
            "writing": str() as writing,
            "files": list() as files,
            "checksums": checksums,
            "index": index,
            "facts": dict() as facts,
        } if form == _FORMAT:
            if version != VERSION:
                text_ = f"is of version {version} of the format; this unidist reads version {VERSION}"
                raise CheckpointError(f"{MANIFEST}: {text_}", file=MANIFEST)
            if step not in (None, number):
                raise CheckpointError(f"{MANIFEST}: is that of step {number}, not of {step}", file=MANIFEST)
            told = tuple(told_of(row) for row in files)
            return Manifest(number, writing, told, told_of(checksums), told_of(index), facts, *_in_parts(found))
        case _:
            raise CheckpointError(f"{MANIFEST}: is not that of a checkpoint", file=MANIFEST)


def _in_parts(found: object) -> tuple[tuple[Tensor, ...], str]:
    match found:
        case {"folder": str() as folder, "tensors": list() as rows}:
            return tuple(_tensor(row) for row in rows), folder
        case {"folder": _} | {"tensors": _}:
            raise CheckpointError(f"{MANIFEST}: does not tell which tensors its parts are of", file=MANIFEST)
    return (), ""


def _tensor(row: object) -> Tensor:
    match row:
        case [str() as name, str() as dtype, list() as shape, str() as kind]:
            return Tensor(name, dtype, tuple(shape), kind)
    raise CheckpointError(f"{MANIFEST}: describes no tensor: {row!r:.200}", file=MANIFEST)


def told_of(row: object, where: str = MANIFEST) -> Told:
    """The file that a row of `where` describes. Raises CheckpointError: it describes none."""
    match row:
        case {"name": str() as name, "size": int() as size, "length": int() as length, "crc32c": int() as number}:
            if 0 <= length <= size < 1 << 63:
                return Told(name, size, length, number)
    raise CheckpointError(f"{where}: describes no file: {row!r:.200}", file=where)


def checksums_of(tensors: int, ranges: int, blocks: int) -> FileSpec:
    """The file of the checksums of so many tensors, ranges and blocks."""
    shapes = {FIRSTS: ("int64", (tensors + 1, 2)), BEGINS: ("int64", (ranges,))}
    shapes |= {PLACES: ("uint32", (ranges,)), SUMS: ("uint32", (blocks,))}
    held = [Tensor(name, dtype, shape, "state") for name, (dtype, shape) in shapes.items()]
    return file_of(CHECKSUMS, held, has_stamp=False)


def index_of(files: Iterable[FileSpec]) -> bytes:
    """Hugging Face's index of the model's tensors."""
    held = {tensor.name: (file, tensor) for file in files if file.kind == "model" for tensor in file.tensors.values()}
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for _, tensor in held.values())},
        "weight_map": {name: file.name for name, (file, _) in sorted(held.items())},
    }
    return json.dumps(content, indent=2).encode() + b"\n"
