"""Variables as this process holds them: shards as words of bits, which files are written from.

They are read from files too.

A driver gives a `Held` for each variable. `Whole` is one that each process holds all of, whatever the Keras backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes as ml_dtypes  # NumPy knows its dtypes by name from here on
import numpy as np

from unidist.algebra import Sharding
from unidist.algebra.sharding import Region
from unidist.backends.protocol import Array
from unidist.checkpoint.regions import whole
from unidist.checkpoint.shares import Piece, Share

# Words of as many bits as an entry: what moves bits needs no dtype.
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# (region, where to put its words or None) -> its words, in the region's shape.
Read = Callable[[Region, "Array | None"], Array]


class Held:
    """A variable's value, as this process holds it.

    Attributes:
        shape, dtype: of the whole value; the dtype as Keras spells it.
        sharding: how it is stored; None: each process holds all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding | None = None

    def fetch(self) -> None:
        """Makes a value whole that is a sum over ranks. A collective of all processes for such a one."""

    def part(self, rank: int) -> Array:
        """The words that a rank of this process stores; all of them without a sharding. No collective."""
        raise NotImplementedError

    def exchanged(self, share: Share) -> Iterator[tuple[int, Array]]:
        """Yields (first row, words of rows) that this process gets where rows are exchanged.

        A collective of the teams.
        """
        raise NotImplementedError("every process holds it")

    def put(self, read: Read) -> None:
        """Stores what `read` gives for the regions of this process's ranks. No collective."""
        raise NotImplementedError


class Whole(Held):
    """A variable that each process holds all of."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.shape = tuple(int(n) for n in variable.shape)
        self.dtype = str(variable.dtype)

    def part(self, rank: int) -> Array:
        return words(np.asarray(self.variable))

    def put(self, read: Read) -> None:
        self.variable.assign(entries(read(whole(self.shape), None), self.dtype))


class OfFirst(Held):
    """An array that is no variable: process 0 writes it, and all read it.

    Attributes:
        value: None where another process has it, or before it was read.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, value: Array | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.value = value

    def part(self, rank: int) -> Array:
        assert self.value is not None
        return words(self.value)

    def put(self, read: Read) -> None:
        self.value = entries(read(whole(self.shape), None), self.dtype)


class OnMesh(Held):
    """A variable. The ranks of this process store shards of it, or replicas."""

    sharding: Sharding

    def __init__(self, variable: Any, sharding: Sharding) -> None:
        self.variable = variable
        self.shape = sharding.shape
        self.dtype = str(variable.dtype)
        self.sharding = sharding

    def values(self, ranks: Iterable[int], read: Read) -> Iterator[Array]:
        """Yields what each of the ranks is to store. A region that several have is read once."""
        came: dict[Region, Array] = {}
        for region in map(self.sharding.region, ranks):
            if region not in came:
                came[region] = entries(read(region, None), self.dtype)
            yield came[region]


def words(array: Array) -> Array:
    """An array's entries as unsigned words of as many bits."""
    return np.ascontiguousarray(array).view(WORDS[array.dtype.itemsize]).reshape(array.shape)


def entries(value: Array, dtype: str) -> Array:
    """Words as entries of a dtype."""
    return value.view(np.dtype(dtype))


def rows_of(held: Held, share: Share) -> Iterator[tuple[int, Array]]:
    """(first row, words of rows): all that this process is to write of a variable."""
    if share.is_exchanged:
        yield from held.exchanged(share)
    else:
        for piece in share.pieces():
            yield piece.start, _of_own(held, share, piece)


def _of_own(held: Held, share: Share, piece: Piece) -> Array:
    sharding, dim = share.sharding, share.dim
    if held.sharding is None:
        return _cut(held.part(0), dim, piece.start, piece.stop)
    if len(piece.team) == 1:
        (rank,) = piece.team
        start = sharding.region(rank)[dim][0] if held.shape else 0
        return _cut(held.part(rank), dim, piece.start - start, piece.stop - start)
    shape = tuple(piece.stop - piece.start if k == dim else n for k, n in enumerate(held.shape))
    out: Array = np.empty(shape, WORDS[share.itemsize])
    for rank in piece.team:
        region = sharding.region(rank)
        place = tuple(slice(None) if k == dim else slice(lo, lo + n) for k, (lo, n) in enumerate(region))
        start = region[dim][0]
        out[place] = _cut(held.part(rank), dim, piece.start - start, piece.stop - start)
    return out


def _cut(array: Array, dim: int, start: int, stop: int) -> Array:
    return array[(slice(None),) * dim + (slice(start, stop),)] if array.ndim else array
