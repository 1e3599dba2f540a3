"""A step in a node's memory: what each process would write into files, and a neighbour's beside it.

Each process has two memory files (launch/memory.py). One holds a step that stands while the next is written into the
other, so that a process may be lost at any moment. A file is

| offset | what |
|---|---|
| 0 | the header: a mark, how many parts stand here, where each begins and how long it is, and a checksum |
| 4096 | the process's own part |
| after it | the neighbour's |

and a part is the bytes of its pieces one behind the other, a table in JSON, and a trailer: the length of both and the
table's checksum. It ends at a multiple of 4096. The header is cleared first and written last.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unidist.checkpoint import disk
from unidist.checkpoint.checksums import Bytes, crc
from unidist.checkpoint.tensors import FileSpec, file_told, parse_json
from unidist.checkpoint.writing import Gathered
from unidist.errors import CheckpointError

BLOCK = 4096
_MARK = b"unidistM"
_HEADER = struct.Struct("<8s5Q")
_CHECKED = struct.Struct("<Q")
_TRAILER = struct.Struct("<QQQ")
_NAME = "a step in memory"


@dataclass(frozen=True, slots=True)
class Key:
    """Says which step a part belongs to. Parts of one key are of one moment.

    Attributes:
        step: its number among the checkpoints of the directory.
        attempt: how often the run had been started again when it was written.
        directory: of the training's checkpoints.
        count: processes that wrote it.
    """

    step: int
    attempt: int
    directory: str
    count: int


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a step that one process wrote, where it stands in this node's memory.

    Attributes:
        key: of the step.
        place: of the process that wrote it.
        path, offset: where its bytes begin.
        table: as it stands there.
    """

    key: Key
    place: int
    path: str
    offset: int
    table: bytes

    def read(self, begin: int, out: Bytes) -> None:
        """Reads bytes of the pieces from one on."""
        opened = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            disk.read_into(opened, out.data, self.offset + begin, _NAME)
        finally:
            os.close(opened)


def pieces_of(table: bytes) -> list[tuple[str, int, int]]:
    """(tensor, first byte, bytes) of each piece, in the order in which they stand."""
    return [(name, begin, nbytes) for name, begin, nbytes in _parsed(table)["pieces"]]


def contents_of(table: bytes) -> tuple[tuple[FileSpec, ...], dict[str, Any]]:
    """The files whose tensors these are, and the facts, of the table of the first process's part."""
    found = _parsed(table)
    return tuple(file_told(file) for file in found["files"]), found["facts"]


def _parsed(table: bytes) -> dict[str, Any]:
    found = parse_json(table, _NAME)
    if not isinstance(found, dict):
        raise CheckpointError(f"{_NAME}: its table is none")
    return found


class Slot:
    """The memory of one process.

    Args:
        paths: of its files.
        keeps: of the step that this training goes on from, which is overwritten last.

    Raises:
        CheckpointError: the launcher that keeps the memory is gone.
    """

    def __init__(self, paths: Sequence[str], keeps: Key | None = None) -> None:
        with disk.told(_NAME):
            self._opened = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        found = [next((part.key for part in _standing(one, "")), None) for one in self._opened]
        self._at = found.index(keeps) if keeps in found else 0
        self._gathered = Gathered(self._file, _NAME, BLOCK)
        self._parts: list[tuple[int, int]] = []

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.pop())

    def begin(self) -> None:
        """Begins a step, in the place of the one before the last."""
        self._at = 1 - self._at
        with disk.told(_NAME):
            os.pwrite(self._file, bytes(_HEADER.size + _CHECKED.size), 0)
        self._gathered, self._parts = Gathered(self._file, _NAME, BLOCK), []

    @property
    def _file(self) -> int:
        return self._opened[self._at]

    def write(self, name: str, begin: int, data: Any) -> None:
        """Copies the bytes of a tensor from one on.

        Args:
            data: a contiguous array of NumPy.
        """
        self._gathered.write(name, begin, data)

    def finish(self, key: Key, place: int, files: Sequence[FileSpec], facts: Mapping[str, Any]) -> None:
        """Writes the table.

        Raises:
            CheckpointError: the facts are no JSON.
        """
        told = {
            **asdict(key),
            "place": place,
            "pieces": self._gathered.pieces,
            "files": [] if place else [file.told for file in files],
            "facts": {} if place else facts,
        }
        try:
            table = json.dumps(told, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{_NAME}: its facts are no JSON: {error}") from error
        nbytes = self._gathered.end - BLOCK
        padding = bytes(-(nbytes + len(table) + _TRAILER.size) % BLOCK)
        rest = table + padding + _TRAILER.pack(nbytes, len(table), crc(table))
        with disk.told(_NAME):
            disk.write_all(self._file, np.frombuffer(rest, np.uint8), self._gathered.end)
        self._parts = [(BLOCK, nbytes + len(rest))]

    @property
    def blocks(self) -> int:
        """The blocks that the own part has."""
        return self._parts[0][1] // BLOCK

    def own(self, begin: int, out: Bytes) -> None:
        """Reads bytes of the own part; those behind its end stay as they are."""
        offset, length = self._parts[0]
        disk.read_into(self._file, out[: max(0, length - begin)].data, offset + begin, _NAME)

    def keep(self, begin: int, data: Bytes, blocks: int) -> None:
        """Writes bytes of the neighbour's part, which has so many blocks."""
        offset = sum(self._parts[0])
        with disk.told(_NAME):
            disk.write_all(self._file, data[: max(0, blocks * BLOCK - begin)], offset + begin)
        self._parts[1:] = [(offset, blocks * BLOCK)]

    def stand(self) -> None:
        """All parts are whole."""
        numbers = [number for part in self._parts for number in part]
        header = _HEADER.pack(_MARK, len(self._parts), *numbers, *[0] * (4 - len(numbers)))
        with disk.told(_NAME):
            os.pwrite(self._file, header + _CHECKED.pack(crc(header)), 0)


def parts_in(paths: Sequence[str]) -> list[Part]:
    """All parts that stand in these files."""
    found: list[Part] = []
    for path in paths:
        # The launcher has gone, and this process goes with it.
        with contextlib.suppress(FileNotFoundError):
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found += _standing(opened, path)
            finally:
                os.close(opened)
    return found


def _standing(opened: int, path: str) -> Iterator[Part]:
    header = os.pread(opened, _HEADER.size + _CHECKED.size, 0)
    content, checksum = header[: _HEADER.size], header[_HEADER.size :]
    if content[: len(_MARK)] != _MARK or checksum != _CHECKED.pack(crc(content)):
        return
    _, count, *numbers = _HEADER.unpack(content)
    for offset, length in zip(numbers[0 : 2 * count : 2], numbers[1 : 2 * count : 2], strict=True):
        nbytes, of_table, number = _TRAILER.unpack(
            disk.read_exactly(opened, _TRAILER.size, offset + length - _TRAILER.size, _NAME)
        )
        table = disk.read_exactly(opened, of_table, offset + nbytes, _NAME)
        if crc(table) != number:
            raise CheckpointError(f"{_NAME}: its table is damaged")
        told = _parsed(table)
        key = Key(told["step"], told["attempt"], told["directory"], told["count"])
        yield Part(key, told["place"], path, offset, table)
