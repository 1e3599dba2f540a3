"""Reads a step that is spread over the memory of several nodes: its own node's parts, and the rest.

The rest comes by a line of the processes: arrays from any one to all, and from each to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np

from unidist import events, session
from unidist.algebra import Layout, Mesh, Sharding
from unidist.algebra.sharding import Region
from unidist.backends.protocol import Array
from unidist.checkpoint.checksums import Bytes
from unidist.checkpoint.memory import Part, contents_of, pieces_of
from unidist.checkpoint.regions import rows_dim, whole
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError
from unidist.keras.checkpoint.held import WORDS, Held
from unidist.keras.consistency.processes import Processes

T = TypeVar("T")
PURPOSE = "a step in memory"
_AXIS = "rank"
# Bytes of tensors that are brought at once, or one tensor.
_WINDOW, _CHUNK = 32 << 20, 4 << 20


@dataclass(frozen=True)
class Line:
    """Collectives of several processes, by the backend in use: bytes, where `Processes` has numbers.

    Args:
        processes: those that take part in each.
    """

    processes: Processes

    @cached_property
    def _mesh(self) -> Mesh:
        ranks = sorted(rank for ranks in self.processes.ranks for rank in ranks)
        return Mesh({_AXIS: len(ranks)}, ranks)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.processes.ranks[self.processes.place]

    def of_place(self, place: int, given: Array) -> Array:
        """One process's array, on all. All give one of the same shape, of int32."""
        if self.processes.count == 1:
            return given
        backend = session.backend()
        sharding = Sharding(self._mesh, Layout(), given.shape)
        root = self._mesh.devices.index(self.processes.ranks[place][0])
        with events.for_purpose(PURPOSE):
            held = backend.from_local([given] * len(self._own), sharding)
            return backend.gather(backend.broadcast(held, sharding, (_AXIS,), root), sharding)

    def bytes_of_place(self, place: int, data: bytes) -> bytes:
        """One process's bytes, on all; what others give is not looked at."""
        length = int(self.of_place(place, np.array([len(data)], np.int32))[0])
        given = room(length)
        if self.processes.place == place:
            given.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        return self.of_place(place, given).view(np.uint8)[:length].tobytes()

    def sent(self, given: Array, pairs: Sequence[tuple[int, int]]) -> Array:
        """Returns what another process has sent here. All give an array of one length, of int32.

        Args:
            pairs: (place that sends, place that gets); each place stands once on either side.
        """
        backend = session.backend()
        mesh, first = self._mesh, self.processes.firsts
        sharding = Sharding(mesh, Layout(_AXIS), (mesh.size, len(given)))
        index = mesh.devices.index
        among = tuple((index(first[source]), index(first[target])) for source, target in pairs)
        with events.for_purpose(PURPOSE):
            held = backend.from_local([given[None]] * len(self._own), sharding)
            moved = backend.to_local(backend.permute(held, sharding, (_AXIS,), among), sharding)[self._own[0]]
        ops = getattr(backend, "ops", None)
        found: Array = (np.asarray(moved) if ops is None else ops.to_numpy(moved))[0]
        return found


def room(nbytes: int) -> Array:
    """Zeros of int32 that hold so many bytes, a power of two: programs are compiled once for a shape."""
    return np.zeros(1 << max(-(-nbytes // 4) - 1, 255).bit_length(), np.int32)


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

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Source:
    """A step in memory, as a `Reader` is one on the disk.

    A collective makes it: all parts' tables come to all.

    Args:
        step: its number.
        holders: the processes that read it.
        nodes: each process's node.
        having: the nodes that have each place's part.
        own: the parts that this node has.

    Attributes:
        where: for errors.
        tensors: name -> the tensor.
        facts: that were given with it.
    """

    where = "the nodes' memory"

    def __init__(
        self,
        step: int,
        holders: Processes,
        nodes: tuple[int, ...],
        having: Mapping[int, Sequence[int]],
        own: Mapping[int, Part],
    ) -> None:
        self.step, self._holders, self._nodes, self._having, self._own = step, holders, nodes, having, own
        self._pieces: dict[str, list[Piece]] = {}
        self._windows: Iterator[list[str]] = iter(())
        self._brought: dict[str, list[tuple[int, Bytes]]] = {}
        self._wanted: dict[str, Held] = {}
        for place in range(len(having)):
            table = own[place].table if place in own else b""
            table, at = Line(holders).bytes_of_place(nodes.index(having[place][0]), table), 0
            if place == 0:
                files, self.facts = contents_of(table)
            for name, begin, nbytes in pieces_of(table):
                self._pieces.setdefault(name, []).append(Piece(begin, begin + nbytes, place, at))
                at += nbytes
        self.tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}

    # what others bring ------------------------------------------------------------------------------------------------

    def plan(self, wanted: Sequence[tuple[str, Held]]) -> None:
        """Says which variables will be read, in which order. All processes say the same."""
        self._wanted = dict(wanted)
        self._windows = _grouped(self._wanted, lambda name: self.tensors[name].nbytes, _WINDOW)

    def bring(self, name: str) -> None:
        """Returns when this process has the bytes that it will read of a variable. A collective."""
        if self._holders.count == 1:
            return
        while name not in self._brought:
            window = next(self._windows)
            self._brought = {one: [] for one in window}
            line = Line(self._holders)
            for holder, pieces in self._missing(window).items():
                for batch in _grouped(pieces, lambda one: one[1].nbytes, _CHUNK):
                    self._send(line, holder, batch)

    def _missing(self, window: Sequence[str]) -> dict[int, list[tuple[str, Piece]]]:
        """holder -> the pieces that it sends, since some process needs them and its node has them not."""
        found: dict[int, list[tuple[str, Piece]]] = {}
        for name in window:
            needed = self._needed(name)
            for piece in _parts_of(self._pieces.get(name, ())):
                having = self._having[piece.place]
                others = (place for place, node in enumerate(self._nodes) if node not in having)
                if any(_overlap(run, piece) for place in others for run in needed[place]):
                    found.setdefault(self._nodes.index(having[0]), []).append((name, piece))
        return found

    def _needed(self, name: str) -> list[list[tuple[int, int]]]:
        tensor, held, holders = self.tensors[name], self._wanted[name], self._holders
        sharding = held.sharding
        if sharding is None:
            return [[_run(tensor, whole(tensor.shape))]] * holders.count
        return [[_run(tensor, one) for one in {sharding.region(rank) for rank in ranks}] for ranks in holders.ranks]

    def _send(self, line: Line, holder: int, batch: Sequence[tuple[str, Piece]]) -> None:
        ends = list(accumulate(piece.nbytes for _, piece in batch))
        given = room(ends[-1]).view(np.uint8)
        if line.processes.place == holder:
            for (_, piece), end in zip(batch, ends, strict=True):
                self._own[piece.place].read(piece.at, given[end - piece.nbytes : end])
        came = line.of_place(holder, given.view(np.int32)).view(np.uint8)
        for (name, piece), end in zip(batch, ends, strict=True):
            if self._nodes[line.processes.place] not in self._having[piece.place]:
                self._brought[name].append((piece.begin, came[end - piece.nbytes : end]))

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


def _parts_of(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        for begin in range(piece.begin, piece.end, _CHUNK):
            yield Piece(begin, min(begin + _CHUNK, piece.end), piece.place, piece.at + begin - piece.begin)


def _grouped(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + nbytes(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += nbytes(item)
    if group:
        yield group
