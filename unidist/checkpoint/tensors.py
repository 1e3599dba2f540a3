"""The content of a checkpoint: named tensors, each whole and row major in one plain safetensors file.

A file begins with the length of its header (8 bytes, little endian). The header is JSON, padded with spaces to a
multiple of eight bytes, and says of each tensor its dtype, shape, and where its bytes are. Those follow without holes,
items of more bytes first and names in order, so each tensor begins at a multiple of its item's size.

The header has a stamp of fixed length: the step, and a number drawn by chance for each time that one is written. By it
a file of another step is known. Which tensor stands where does not depend on it, so all processes find the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidist.errors import CheckpointError

# An asset is of a layer, and is no variable of it (assets.py).
KINDS = ("model", "optimizer", "state", "asset")
LARGEST = 5 * 10**9
# Of a header and of a manifest. JSON of 8 MiB is at most some 200 MB of Python's objects, whoever wrote it.
LARGEST_TEXT = 8 << 20
# More dims than any framework has.
MOST_DIMS = 64
# NumPy's name -> (safetensors' code, bytes of an item)
DTYPES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_METADATA = "__metadata__"
_BLANK = {"step": "0" * 12, "writing": "0" * 32}
_STAMP = re.compile(rb'\{"__metadata__":\{"step":"(\d{12})","writing":"([0-9a-f]{32})"\}')
# Beside names and shapes: `:{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},` and two numbers of up to 19 digits.
_ENTRY = 56 + 2 * 19
_BEGINNING = 8 + 8 + len(json.dumps({_METADATA: _BLANK}))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole logical tensor. `dtype` as NumPy and Keras call it; `kind` is one of KINDS."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "model"

    def __post_init__(self) -> None:
        problem = _problem(self.name, self.dtype, self.shape, self.kind)
        if problem:
            raise CheckpointError(f"tensor {self.name!r:.200} {problem}", tensor=str(self.name)[:200])

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def _problem(name: object, dtype: object, shape: tuple[object, ...], kind: object) -> str:
    if not isinstance(name, str) or name in ("", _METADATA) or not _is_unicode(name):
        return "has a name that no file can hold"
    if dtype not in DTYPES:
        return f"has the dtype {dtype!r:.50}, which safetensors files do not have"
    if kind not in KINDS:
        return f"is of the kind {kind!r:.50}, not one of {', '.join(KINDS)}"
    if len(shape) > MOST_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        return f"has the shape {shape!r:.200}"
    # A size of 0 hides the others, which NumPy multiplies all the same.
    if math.prod(max(n, 1) for n in shape if type(n) is int) * DTYPES[str(dtype)][1] >= 1 << 63:
        return f"has the shape {shape!r:.200}, of more bytes than a file can have"
    return ""


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file of a checkpoint.

    Attributes:
        name: of the file.
        header: its first bytes, with the length; the stamp is blank.
        begins: tensor's name -> where in the file its bytes begin.
        size: the file's bytes.
        tensors: tensor's name -> the tensor, in the file's order.
    """

    name: str
    header: bytes
    begins: Mapping[str, int]
    size: int
    tensors: Mapping[str, Tensor] = field(repr=False)

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    @property
    def told(self) -> tuple[str, int, str]:
        """The JSON from which another process makes it again (`file_told`)."""
        return self.name, self.size, self.header[8:].decode()


def files_of(tensors: Iterable[Tensor], largest: int = LARGEST, *, has_stamp: bool = True) -> tuple[FileSpec, ...]:
    """Returns which tensors go into which file, in the order given: every process computes the same.

    Args:
        tensors: with names of their own, whatever their kind.
        largest: bytes of a file at most, unless one tensor alone has more.
        has_stamp: whether the files name their step.

    Raises:
        CheckpointError: two tensors of one name.
    """
    groups: dict[str, list[list[Tensor]]] = {kind: [] for kind in KINDS}
    costs = dict.fromkeys(KINDS, (0, 0))
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointError(f"two tensors are called {tensor.name!r}", tensor=tensor.name)
        seen.add(tensor.name)
        text = len(json.dumps(tensor.name)) + 21 * len(tensor.shape) + _ENTRY
        texts, data = costs[tensor.kind]
        texts, data = texts + text, data + tensor.nbytes
        if not groups[tensor.kind] or _BEGINNING + texts + data > largest or _BEGINNING + texts > LARGEST_TEXT:
            groups[tensor.kind].append([])
            texts, data = text, tensor.nbytes
        groups[tensor.kind][-1].append(tensor)
        costs[tensor.kind] = texts, data
    return tuple(
        file_of(f"{kind}-{number:05d}-of-{len(parts):05d}.safetensors", part, has_stamp=has_stamp)
        for kind, parts in groups.items()
        for number, part in enumerate(parts, 1)
    )


def file_of(name: str, tensors: Sequence[Tensor], *, has_stamp: bool = True) -> FileSpec:
    """A file of these tensors; without a stamp nothing but its tensors is known."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.name))
    entries: dict[str, object] = {_METADATA: _BLANK} if has_stamp else {}
    offsets, end = [], 0
    for tensor in ordered:
        offsets.append(end)
        end += tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [offsets[-1], end]}
        entries[tensor.name] = {"dtype": DTYPES[tensor.dtype][0], **place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begins = {t.name: 8 + len(text) + offset for t, offset in zip(ordered, offsets, strict=True)}
    header = len(text).to_bytes(8, "little") + text
    return FileSpec(name, header, begins, len(header) + end, {tensor.name: tensor for tensor in ordered})


def stamped(header: bytes, step: int, writing: str) -> bytes:
    """The header as it stands in a file of this step."""
    found = _STAMP.match(header, 8)
    assert found is not None
    return (
        header[: found.start(1)]
        + b"%012d" % step
        + header[found.end(1) : found.start(2)]
        + writing.encode()
        + (header[found.end(2) :])
    )


def stamp_of(header: bytes) -> tuple[int, str] | None:
    """(step, number of the writing) of a header; None where it has none."""
    found = _STAMP.match(header, 8)
    return (int(found[1]), found[2].decode()) if found else None


def parsed(name: str, header: bytes, size: int) -> FileSpec:
    """The file that a header describes, which anybody may have written.

    Raises:
        CheckpointError: tensors that cannot be, that overlap, or that are not the file's bytes, all of them.
    """
    kind = name.partition("-")[0]
    content = parse_json(header[8:], name)
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: its header is not an object of tensors", file=name)
    content.pop(_METADATA, None)
    placed: list[tuple[int, int, Tensor]] = []
    for tensor, entry in content.items():
        placed.append(_placed(name, tensor, entry, kind if kind in KINDS else "state"))
    placed.sort(key=lambda one: one[:2])
    end = 0
    for begin, its_end, tensor in placed:
        if begin != end or its_end - begin != tensor.nbytes:
            text = f"has the bytes {begin}..{its_end}; {tensor.nbytes} from {end} on were due"
            raise CheckpointError(f"{name}: tensor {tensor.name!r:.200} {text}", file=name, tensor=tensor.name)
        end = its_end
    if len(header) + end != size:
        text = f"its header counts {len(header) + end} bytes, the file has {size}"
        raise CheckpointError(f"{name}: {text}", file=name)
    begins = {tensor.name: len(header) + begin for begin, _, tensor in placed}
    return FileSpec(name, header, begins, size, {tensor.name: tensor for *_, tensor in placed})


def file_told(told: Sequence[Any]) -> FileSpec:
    """The file that `FileSpec.told` has described."""
    name, size, text = told
    encoded = text.encode()
    return parsed(name, len(encoded).to_bytes(8, "little") + encoded, size)


def _placed(file: str, name: str, entry: object, kind: str) -> tuple[int, int, Tensor]:
    match entry:
        case {"dtype": str() as code, "shape": list() as shape, "data_offsets": [int() as begin, int() as end]}:
            try:
                return begin, end, Tensor(name, _NAMES.get(code, code), tuple(shape), kind)
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {error}", file=file, tensor=error.tensor) from None
        case _:
            raise CheckpointError(
                f"{file}: tensor {name!r:.200} has no dtype, shape and offsets", file=file, tensor=name
            )


def parse_json(text: bytes, file: str) -> object:
    """JSON that anybody may have written; its length is bounded by whoever read it.

    Raises:
        CheckpointError: it is none, is nested too deeply, has a key twice, or a number that JSON does not know.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: does not parse as JSON: {error!s:.200}", file=file) from None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
