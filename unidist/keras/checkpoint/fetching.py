"""Reads a step that is spread over the memory of several nodes: its own node's parts, and the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unidist.algebra.sharding import Region
from unidist.backends.protocol import Array
from unidist.checkpoint.checksums import Bytes
from unidist.checkpoint.memory import Part, contents_of, pieces_of
from unidist.checkpoint.regions import rows_dim, whole
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError
from unidist.keras.checkpoint.held import WORDS, Held
from unidist.keras.checkpoint.line import Line, room
from unidist.keras.checkpoint.states import Holders

PURPOSE = "a step in memory"
# Bytes of tensors that are brought at once, or one tensor.
_WINDOW, _CHUNK = 32 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a tensor, which one process has written.

    Attributes:
        place: of that process.
        at: where they are among the bytes of its part.
    """

    begin: int
    end: int
    place: int
    at: int


@dataclass
class Source:
    """A step in memory, as a `Reader` is one on the disk.

    Attributes:
        step: its number.
        where: for errors.
        tensors: name -> the tensor.
        facts: that were given with it.
    """

    step: int
    where: str
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    _holders: Holders
    _nodes: tuple[int, ...]
    _having: Mapping[int, Sequence[int]]
    _own: Mapping[int, Part]
    _pieces: Mapping[str, list[Piece]]
    _windows: Iterator[list[str]] = field(default_factory=lambda: iter(()))
    _brought: dict[str, list[tuple[int, Bytes]]] = field(default_factory=dict)
    _wanted: dict[str, Held] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: int,
        holders: Holders,
        nodes: tuple[int, ...],
        where: Mapping[int, Sequence[int]],
        own: Mapping[int, Part],
    ) -> Source:
        """A collective: all parts' tables come to all.

        Args:
            nodes: each process's node.
            where: the nodes that have each place's part.
            own: the parts that this node has.
        """
        tables = []
        for place, having in where.items():
            table = own[place].table if place in own else b""
            if holders.several is not None:
                table = Line(holders.several, PURPOSE).bytes_of_place(nodes.index(having[0]), table)
            tables.append(table)
        files, facts = contents_of(tables[0])
        pieces: dict[str, list[Piece]] = {}
        for place, table in enumerate(tables):
            at = 0
            for name, begin, nbytes in pieces_of(table):
                pieces.setdefault(name, []).append(Piece(begin, begin + nbytes, place, at))
                at += nbytes
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        return cls(step, "the nodes' memory", tensors, facts, holders, nodes, where, own, pieces)

    # what others bring ------------------------------------------------------------------------------------------------

    def plan(self, wanted: Sequence[tuple[str, Held]]) -> None:
        """Says which variables will be read, in which order. All processes say the same."""
        self._wanted = dict(wanted)
        self._windows = _windows([self.tensors[name] for name in self._wanted])

    def bring(self, name: str) -> None:
        """Returns when this process has the bytes that it will read of a variable. A collective."""
        if self._holders.several is None:
            return
        while name not in self._brought:
            window = next(self._windows)
            self._brought = {one: [] for one in window}
            line = Line(self._holders.several, PURPOSE)
            for holder, pieces in self._missing(window).items():
                for batch in _batches(pieces):
                    self._send(line, holder, batch)

    def _missing(self, window: Sequence[str]) -> dict[int, list[tuple[str, Piece]]]:
        """holder -> the pieces that it sends, since some process needs them and its node has them not."""
        found: dict[int, list[tuple[str, Piece]]] = {}
        for name in window:
            needed = self._needed(name)
            for piece in self._pieces.get(name, ()):
                having = self._having[piece.place]
                others = (place for place, node in enumerate(self._nodes) if node not in having)
                if any(_overlap(run, piece) for place in others for run in needed[place]):
                    found.setdefault(self._nodes.index(having[0]), []).append((name, piece))
        return found

    def _needed(self, name: str) -> list[list[tuple[int, int]]]:
        """The runs of bytes that each process reads."""
        tensor, held, several = self.tensors[name], self._wanted[name], self._holders.several
        assert several is not None
        sharding = held.sharding
        if sharding is None:
            return [[_run(tensor, whole(tensor.shape))]] * len(several.ranks)
        return [[_run(tensor, one) for one in {sharding.region(rank) for rank in ranks}] for ranks in several.ranks]

    def _send(self, line: Line, holder: int, batch: Sequence[tuple[str, Piece]]) -> None:
        total = sum(piece.end - piece.begin for _, piece in batch)
        given = room(total).view(np.uint8)
        if line.processes.place == holder:
            at = 0
            for _, piece in batch:
                self._own[piece.place].read(piece.at, given[at : at + piece.end - piece.begin])
                at += piece.end - piece.begin
        came, at = line.of_place(holder, given.view(np.int32)).view(np.uint8), 0
        for name, piece in batch:
            count = piece.end - piece.begin
            if self._nodes[line.processes.place] not in self._having[piece.place]:
                self._brought[name].append((piece.begin, came[at : at + count]))
            at += count

    # reading ----------------------------------------------------------------------------------------------------------

    def read_into(self, name: str, region: Region, out: Bytes) -> None:
        """Reads a region into an array of its bytes.

        Raises:
            CheckpointError: bytes of it are in no memory that this process was brought.
        """
        tensor = self.tensors[name]
        begin, end = _run(tensor, region)
        if end - begin == len(out):
            self._fill(name, begin, end, out)
            return
        run = np.empty(end - begin, np.uint8)
        self._fill(name, begin, end, run)
        dim = rows_dim(tensor.shape)
        rows: Array = run.view(WORDS[tensor.itemsize]).reshape((*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :]))
        cut = rows[(slice(None),) * (dim + 1) + tuple(slice(lo, lo + n) for lo, n in region[dim + 1 :])]
        out.view(rows.dtype).reshape(cut.shape)[...] = cut

    def _fill(self, name: str, begin: int, end: int, out: Bytes) -> None:
        done = 0
        for piece in self._pieces.get(name, ()):
            lo, hi = max(begin, piece.begin), min(end, piece.end)
            if lo < hi and piece.place in self._own:
                self._own[piece.place].read(piece.at + lo - piece.begin, out[lo - begin : hi - begin])
                done += hi - lo
        for first, data in self._brought.get(name, ()):
            lo, hi = max(begin, first), min(end, first + len(data))
            if lo < hi:
                out[lo - begin : hi - begin] = data[lo - first : hi - first]
                done += hi - lo
        if done != end - begin:
            raise CheckpointError(f"step {self.step} in memory: {end - begin - done} bytes of {name} are missing")

    def close(self) -> None:
        self._brought.clear()


def _run(tensor: Tensor, region: Region) -> tuple[int, int]:
    """The bytes from the first to the last row of a region."""
    if not all(n for _, n in region):
        return 0, 0
    if not tensor.shape:
        return 0, tensor.itemsize
    dim = rows_dim(tensor.shape)
    first, count = region[dim]
    row = math.prod(tensor.shape[dim + 1 :]) * tensor.itemsize
    return first * row, (first + count) * row


def _overlap(run: tuple[int, int], piece: Piece) -> bool:
    return max(run[0], piece.begin) < min(run[1], piece.end)


def _windows(tensors: Sequence[Tensor]) -> Iterator[list[str]]:
    """Tensors that are brought at once."""
    window: list[str] = []
    total = 0
    for tensor in tensors:
        if window and total + tensor.nbytes > _WINDOW:
            yield window
            window, total = [], 0
        window.append(tensor.name)
        total += tensor.nbytes
    if window:
        yield window


def _batches(pieces: Sequence[tuple[str, Piece]]) -> Iterator[list[tuple[str, Piece]]]:
    """Pieces, or parts of long ones, that are sent at once."""
    batch: list[tuple[str, Piece]] = []
    total = 0
    for name, piece in pieces:
        for begin in range(piece.begin, piece.end, _CHUNK):
            end = min(begin + _CHUNK, piece.end)
            if total + end - begin > _CHUNK:
                yield batch
                batch, total = [], 0
            batch.append((name, Piece(begin, end, piece.place, piece.at + begin - piece.begin)))
            total += end - begin
    if batch:
        yield batch
