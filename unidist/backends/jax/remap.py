"""Moving a rank's entries along one dim, inside shard_map: the joins and cuts of uneven parts.

Parts are padded at their ends, so where dims do not divide, entries change places when parts are joined or cut. A table
says for each coordinate which entry goes where; in the common cases it comes down to a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import jax
import numpy as np
import numpy.typing as npt
from jax import lax

from unidist.algebra import Axes, Sharding
from unidist.backends.jax.arrays import padded_local

Table = npt.NDArray[np.int32]
_ANY = -1  # padding: any entry will do


@dataclass(frozen=True, eq=False)
class Cuts:
    """Says how `axes` (the minor axes of a dim) cut the parts that a dim has without them.

    Attributes:
        held: the axes that cut the dim already, major to `axes`.
        axes: the axes that cut further.
        lengths: (coordinates along held, places along axes) -> the length of the piece.
        whole: the padded length of a part before the cut.
        piece: the padded length after it.
    """

    held: Axes
    axes: Axes
    lengths: Table
    whole: int
    piece: int

    @property
    def starts(self) -> Table:
        return np.cumsum(self.lengths, axis=1, dtype=np.int32) - self.lengths

    def joining(self) -> Table:
        """(held, whole): where an entry of the part is among the padded pieces, one after the other."""
        table = np.full((len(self.lengths), self.whole), _ANY, np.int32)
        for row, (starts, lengths) in enumerate(zip(self.starts, self.lengths, strict=True)):
            for place, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                table[row, start : start + length] = place * self.piece + np.arange(length)
        return table

    def spreading(self) -> Table:
        """(held, places * piece): which entry of the part goes to a place among the padded pieces."""
        places = self.lengths.shape[1]
        table = np.full((len(self.lengths), places, self.piece), _ANY, np.int32)
        for row, (starts, lengths) in enumerate(zip(self.starts, self.lengths, strict=True)):
            for place, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                table[row, place, :length] = start + np.arange(length)
        return table.reshape(len(table), -1)

    def cutting(self) -> Table:
        """(held and axes, piece): which entry of the part goes where in a rank's own piece."""
        return self.spreading().reshape(-1, self.piece)


@lru_cache(maxsize=4096)
def cuts(cut: Sharding, dim: int, axes: Axes) -> Cuts:
    """The cuts of `axes` along `dim`, from the sharding that has them."""
    mesh, layout = cut.mesh, cut.layout
    held = tuple(axis for axis in layout.dim_axes(dim) if axis not in axes)
    uncut = cut.with_layout(layout.with_axis(axes, "I"))
    origin = dict.fromkeys(mesh.axis_names, 0)
    places = product(*(range(mesh.axis_size(axis)) for axis in held))
    ranks = [mesh.rank_at(origin | dict(zip(held, place, strict=True))) for place in places]
    lengths = np.array([cut.pieces(rank, dim, axes) for rank in ranks], np.int32)
    return Cuts(held, axes, lengths, padded_local(uncut)[dim], padded_local(cut)[dim])


def join(x: jax.Array, dim: int, how: Cuts) -> jax.Array:
    """The part whose padded pieces are one after the other along `dim`."""
    return _pick(x, dim, how.joining(), how.held)


def spread(x: jax.Array, dim: int, how: Cuts) -> jax.Array:
    """A part's padded pieces one after the other along `dim`."""
    return _pick(x, dim, how.spreading(), how.held)


def own_piece(x: jax.Array, dim: int, how: Cuts) -> jax.Array:
    """This rank's piece of a part."""
    return _pick(x, dim, how.cutting(), how.held + how.axes)


def among_zeros(x: jax.Array, dim: int, how: Cuts) -> jax.Array:
    """This rank's piece at its place in a part of zeros."""
    here = how.held + how.axes
    if (how.lengths != how.piece).any():
        places = lax.broadcasted_iota(np.int32, x.shape, dim)
        x = jax.numpy.where(places < _of_this_rank(how.lengths.reshape(-1), here), x, jax.numpy.zeros_like(x))
    room = list(x.shape)
    room[dim] = how.whole + how.piece
    start = _of_this_rank(how.starts.reshape(-1), here)
    full = lax.dynamic_update_slice_in_dim(jax.numpy.zeros(room, x.dtype), x, start, dim)
    return lax.slice_in_dim(full, 0, how.whole, axis=dim)


def _pick(x: jax.Array, dim: int, table: Table, axes: Axes) -> jax.Array:
    """Entry table[coordinate along axes, j] of x at each j along `dim`."""
    count, size = table.shape
    unused = np.asarray(table == _ANY)
    shifts = np.where(unused, np.nan, table - np.arange(size, dtype=np.float64))
    if unused.all():
        return _window(x, dim, 0, size)
    if np.nanmin(shifts) == np.nanmax(shifts):
        return _window(x, dim, int(np.nanmin(shifts)), size)
    empty = unused.all(axis=1, keepdims=True)
    low = np.nanmin(np.where(empty, 0, shifts), axis=1)
    high = np.nanmax(np.where(empty, 0, shifts), axis=1)
    if count > 1 and (low == high).all():
        starts = low.astype(np.int32)
        room = _window(x, dim, 0, max(x.shape[dim], int(starts.max()) + size))
        return lax.dynamic_slice_in_dim(room, _of_this_rank(starts, axes), size, dim)
    # Padding reads an entry beyond the end, which is filled with 0.
    entries = np.where(unused, x.shape[dim], table)
    chosen = entries[0] if (entries == entries[0]).all() else _of_this_rank(entries, axes)
    return jax.numpy.take(x, chosen, axis=dim, mode="fill", fill_value=0)


def _window(x: jax.Array, dim: int, start: int, size: int) -> jax.Array:
    """Entries start to start + size along `dim`; zeros beyond the end."""
    length = x.shape[dim]
    if start == 0 and size == length:
        return x
    if start + size > length:
        x = lax.pad(x, np.zeros((), x.dtype), [(0, start + size - length if d == dim else 0, 0) for d in range(x.ndim)])
    return lax.slice_in_dim(x, start, start + size, axis=dim)


def _of_this_rank(rows: Table, axes: Axes) -> jax.Array:
    """The row of this rank's coordinate along the axes."""
    constant = jax.numpy.asarray(rows)
    return constant[lax.axis_index(axes)] if axes else constant[0]
