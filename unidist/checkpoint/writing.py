"""The part of a step that a process writes: checked, described in one file, joined with all others.

Who cannot go on says nothing, and the step does not count: process 0 joins parts when each has its description.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint import disk
from unidist.checkpoint.checksums import BLOCK, Bytes, Running, crc
from unidist.checkpoint.manifest import BEGINS, FIRSTS, MOST_RANGES, PLACES, SUMS, Told, checksums_of, told_of
from unidist.checkpoint.tensors import LARGEST_TEXT, FileSpec, Tensor, parse_json
from unidist.errors import CheckpointError

Numbers = NDArray[np.int64]
# Checksums are counted of what is written next, while it is in the core's cache.
_PIECE = 1 << 20


def part_of(place: int) -> str:
    """Returns the name of the file in which a process describes its part."""
    return f"part-{place:05d}.ranges"


@dataclass(frozen=True, slots=True)
class Part:
    """The ranges that one process wrote, and their blocks' checksums.

    Attributes:
        names: of its tensors, each with how many ranges it wrote of it.
        begins: of each range, in its tensor.
        ends: of each range.
        sums: of each range's blocks.
        file: in which they are, where each process writes a file of its own.
    """

    names: list[tuple[str, int]]
    begins: Numbers
    ends: Numbers
    sums: NDArray[np.uint32]
    file: Told | None = None

    @classmethod
    def of(cls, ranges: Mapping[str, Sequence[Running]], file: Told | None) -> Part:
        every = [one for of_tensor in ranges.values() for one in of_tensor]
        sums = [np.frombuffer(one.sums, np.uint32) for one in every]
        return cls(
            [(name, len(of_tensor)) for name, of_tensor in ranges.items()],
            np.array([one.begin for one in every], np.int64),
            np.array([one.end for one in every], np.int64),
            np.concatenate(sums) if sums else np.zeros(0, np.uint32),
            file,
        )

    def text(self, place: int, writing: str) -> bytes:
        """The description: a line of JSON, and the numbers."""
        numbers = b"".join(one.tobytes() for one in (self.begins, self.ends, self.sums))
        told = {
            "writing": writing,
            "place": place,
            "crc32c": crc(numbers),
            "tensors": self.names,
            "file": None if self.file is None else asdict(self.file),
        }
        return json.dumps(told).encode() + b"\n" + numbers

    @classmethod
    def parsed(cls, text: bytes, place: int, writing: str) -> Part:
        """The part that a description is of.

        Raises:
            CheckpointError: it is damaged, is none, or is of another process or another try.
        """
        name = part_of(place)
        end = text.find(b"\n", 0, LARGEST_TEXT)
        match parse_json(text[:end], name) if end >= 0 else None:
            case {"writing": its, "place": whose, "crc32c": number, "tensors": [*rows], "file": file}:
                if (its, whose) != (writing, place):
                    raise CheckpointError(f"{name}: is of another try to write this step", file=name)
                content = np.frombuffer(text, np.uint8, offset=end + 1)
                if crc(content) != number:
                    raise CheckpointError(f"{name}: is damaged: its checksum differs", file=name)
                names = [(row[0], row[1]) for row in rows if _counts(row)]
                total = sum(count for _, count in names)
                if len(names) == len(rows) and 16 * total <= len(content) and len(content) % 4 == 0:
                    begins, ends = content[: 16 * total].view(np.int64).reshape(2, total)
                    sums = content[16 * total :].view(np.uint32)
                    if len(sums) == _blocks(begins, ends).sum():
                        return cls(names, begins, ends, sums, None if file is None else told_of(file, name))
        raise CheckpointError(f"{name}: describes no part of a step", file=name)


def _counts(row: Any) -> bool:
    return isinstance(row, list) and [*map(type, row)] == [str, int] and row[1] >= 0


def _blocks(begins: Numbers, ends: Numbers) -> Numbers:
    return -(-(ends - begins) // BLOCK)


class PartWriter(ABC):
    """Writes the part of a step that one process has.

    Args:
        files: of `files_of`, as in all other processes.
        place: this process's number, from 0.
        writing: number of the writing.
    """

    def __init__(self, files: Sequence[FileSpec], place: int, writing: str) -> None:
        self.place, self._writing = place, writing
        self._files = {name: file for file in files for name in file.tensors}
        self._ranges: dict[str, list[Running]] = {}

    def write(self, name: str, begin: int, data: Any) -> None:
        """Writes the bytes [begin, begin + length of `data`) of a tensor.

        Args:
            name: the tensor's.
            begin: the first byte, of the whole row-major tensor.
            data: a contiguous array of NumPy, or bytes.

        Raises:
            CheckpointError: there is no such tensor, it has no such bytes, or the system cannot write them.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"there is no tensor {name!r} to write", tensor=name)
        content, nbytes = as_bytes(data), file.tensors[name].nbytes
        if not 0 <= begin <= begin + len(content) <= nbytes:
            text = f"has {nbytes} bytes, and {begin}..{begin + len(content)} were to be written"
            raise CheckpointError(f"{file.name}: tensor {name!r} {text}", file=file.name, tensor=name)
        if not len(content):
            return
        ranges = self._ranges.setdefault(name, [])
        if not ranges or ranges[-1].end != begin:
            ranges.append(Running(begin))
        for first in range(0, len(content), _PIECE):
            piece = content[first : first + _PIECE]
            ranges[-1].add(piece)
            self._put(file, file.tensors[name], begin + first, piece)

    def finish(self) -> None:
        """All that was written is kept, and then the description that says so.

        Raises:
            CheckpointError: it cannot be written.
        """
        part = Part.of(self._ranges, self._keep())
        self._describe(part_of(self.place), part.text(self.place, self._writing))

    @abstractmethod
    def _put(self, file: FileSpec, tensor: Tensor, begin: int, piece: Bytes) -> None:
        """Takes bytes of a tensor from one on."""

    @abstractmethod
    def _keep(self) -> Told | None:
        """All that was taken outlives this process. The file of its own that it is in, if it has one."""

    @abstractmethod
    def _describe(self, name: str, text: bytes) -> None:
        """Writes the description, of which others see all or nothing."""

    @abstractmethod
    def close(self) -> None:
        """Lets files go."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Gathered:
    """Gathers bytes of tensors in a file, one behind the other.

    Args:
        opened: the file, by its descriptor.
        what: it is, for errors.
        begin: where in it they begin.

    Attributes:
        pieces: (tensor, first byte, bytes) of what stands there; what follows the one before is of its piece.
        end: where in the file they end.
    """

    def __init__(self, opened: int, what: str, begin: int = 0) -> None:
        self._opened, self._what = opened, what
        self.pieces: list[tuple[str, int, int]] = []
        self.end = begin

    def write(self, name: str, begin: int, data: Any) -> None:
        """Takes the bytes of a tensor from one on: a contiguous array of NumPy, or bytes."""
        content = as_bytes(data)
        with disk.told(self._what, name):
            disk.write_all(self._opened, content, self.end)
        self.end += len(content)
        first, nbytes = begin, len(content)
        if self.pieces and self.pieces[-1][0] == name and sum(self.pieces[-1][1:]) == begin:
            _, first, before = self.pieces.pop()
            nbytes += before
        self.pieces.append((name, first, nbytes))


def as_bytes(data: Any) -> Bytes:
    """The bytes of a contiguous array, or of anything that lends its memory, without a copy."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise CheckpointError(f"an array of strides {data.strides} is no run of bytes")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def joined(where: str, tensors: Sequence[Tensor], parts: Sequence[Part]) -> tuple[FileSpec, Iterator[bytes]]:
    """The file of the checksums, and its bytes.

    Args:
        where: for errors.
        tensors: all of them, in order.
        parts: of all processes, in order.

    Raises:
        CheckpointError: a byte was not written, or twice; or it is of no tensor.
    """
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    of, places, firsts = [], [], []
    for number, part in enumerate(parts):
        for name, _ in part.names:
            if name not in numbers:
                raise CheckpointError(f"{part_of(number)}: there is no tensor {name!r:.200}", file=part_of(number))
        counts = [count for _, count in part.names]
        of.append(np.repeat([numbers[name] for name, _ in part.names], counts).astype(np.int64))
        places.append(np.full(sum(counts), number, np.int64))
        blocks = _blocks(part.begins, part.ends)
        firsts.append(np.cumsum(blocks) - blocks)
    tensor, place, first = (np.concatenate(one) for one in (of, places, firsts))
    begin, end = np.concatenate([one.begins for one in parts]), np.concatenate([one.ends for one in parts])
    order = np.lexsort((begin, tensor))
    tensor, place, first, begin, end = (one[order] for one in (tensor, place, first, begin, end))
    counts_of = np.bincount(tensor, minlength=len(tensors))
    _check(where, tensors, counts_of, begin, end)
    blocks = _blocks(begin, end)
    table = np.zeros((len(tensors) + 1, 2), np.int64)
    np.cumsum(counts_of, out=table[1:, 0])
    table[:, 1] = np.concatenate([[0], np.cumsum(blocks)])[table[:, 0]]
    spec = checksums_of(len(tensors), len(begin), int(blocks.sum()))
    content = {FIRSTS: table.tobytes(), BEGINS: begin.tobytes(), PLACES: place.astype(np.uint32).tobytes()}

    def pieces() -> Iterator[bytes]:
        yield spec.header
        for name in spec.tensors:
            if name != SUMS:
                yield content[name]
                continue
            for source, start, count in zip(place.tolist(), first.tolist(), blocks.tolist(), strict=True):
                yield parts[source].sums[start : start + count].tobytes()

    return spec, pieces()


def _check(where: str, tensors: Sequence[Tensor], counts: Numbers, begin: Numbers, end: Numbers) -> None:
    stop = 0
    for tensor, count in zip(tensors, counts.tolist(), strict=True):
        start, stop = stop, stop + count
        due = np.append(0, end[start:stop])
        found = np.append(begin[start:stop], tensor.nbytes)
        wrong = np.flatnonzero(found != due)
        if len(wrong):
            a, b = int(due[wrong[0]]), int(found[wrong[0]])
            text = f"bytes {a}..{b} were not written" if a < b else f"bytes {b}..{a} were written twice"
            raise CheckpointError(f"{where}: tensor {tensor.name!r}: {text}", file=where, tensor=tensor.name)
        if count > MOST_RANGES:
            text = f"was written in {count} ranges; {MOST_RANGES} is the most"
            raise CheckpointError(f"{where}: tensor {tensor.name!r} {text}", file=where, tensor=tensor.name)
