"""Layouts of a value over the axes of a mesh, with the sizes that each place holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from unidist.algebra import Axes, Layout
from unidist.algebra.sharding import chunk
from unidist.errors import LayoutError

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """S(dim) over one axis. `sizes` are the lengths along the dim at each place of it; some may be 0."""

    dim: int
    sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"S({self.dim}, {'+'.join(map(str, self.sizes))})"


WHOLE: Final = "R"
PARTIAL: Final = "P"
# Over one axis: the whole on every rank, whose gradient is partial (the algebra's F); a part; a sum's part.
State = Cut | str
# One for each axis of the mesh, in its order.
States = tuple[State, ...]


@lru_cache(maxsize=256)
def chunked(dim: int, size: int, places: int) -> Cut:
    """torch.chunk's sizes: ceil-sized, the last places may hold less or nothing."""
    return Cut(dim, tuple(length for _, length in chunk(size, places)))


def cuts(states: Iterable[State]) -> list[tuple[int, Cut]]:
    """(axis, cut) of those that are cut."""
    return [(axis, state) for axis, state in enumerate(states) if isinstance(state, Cut)]


def cut_dims(states: Iterable[State]) -> list[int]:
    return [state.dim for state in states if isinstance(state, Cut)]


def conflict(states: Iterable[State]) -> bool:
    """Returns whether two axes cut one dim, which no rule has."""
    dims = cut_dims(states)
    return len(set(dims)) < len(dims)


def local_shape(shape: Shape, states: States, places: Sequence[int]) -> Shape:
    """Returns the shape that the rank at these places of the axes holds."""
    out = list(shape)
    for axis, cut in cuts(states):
        out[cut.dim] = cut.sizes[places[axis]]
    return tuple(out)


def whole_shape(local: Iterable[int], states: States) -> Shape:
    """Returns the global shape where a rank holds a part of this shape."""
    out = list(local)
    for _, cut in cuts(states):
        out[cut.dim] = sum(cut.sizes)
    return tuple(out)


def offset(cut: Cut, place: int) -> int:
    """Returns where the part of a place begins along the dim."""
    return sum(cut.sizes[:place])


def dual(states: States) -> States:
    """The layout of the gradient: WHOLE and PARTIAL change places."""
    return tuple(PARTIAL if state == WHOLE else WHOLE if state == PARTIAL else state for state in states)


def share(shape: Shape, states: States, sizes: Sequence[int]) -> int:
    """Returns the elements of a rank where parts are even: one number for all, so that they agree."""
    return -(-prod(shape) // prod(sizes[axis] for axis, _ in cuts(states)))


def fraction(place: int, places: int) -> float:
    """A place's part of one: powers of two that add up to it, so that nothing is rounded."""
    full = 1 << (places.bit_length() - 1)
    return 1 / (2 * full) if place < 2 * (places - full) else 1 / full


def layout_of(states: States, lines: Sequence[str | Axes], fanned: bool = False) -> Layout:
    """The algebra's layout, which has torch.chunk's sizes: those of the cuts are let go.

    Args:
        lines: the axis that each state is given of, or several that cut as one.
        fanned: what is whole has a partial gradient (F), and not a whole one (I).
    """
    named = [(line,) if isinstance(line, str) else line for line in lines]
    dims: list[Axes] = [()] * (max(cut_dims(states), default=-1) + 1)
    for line, cut in cuts(states):
        dims[cut.dim] = named[line]

    def over(wanted: State) -> Axes:
        return tuple(axis for line, state in zip(named, states, strict=True) if state == wanted for axis in line)

    return Layout(*dims, partial=over(PARTIAL), fanout=over(WHOLE) if fanned else ())


def check(shape: Shape, states: States, sizes: Sequence[int]) -> None:
    """Raises LayoutError where states do not fit a shape on axes of these sizes."""
    if len(states) != len(sizes):
        raise LayoutError(f"{states} names {len(states)} axes, the mesh has {len(sizes)}")
    if conflict(states):
        raise LayoutError(f"{states}: two axes cut one dim: give the mesh one axis of their product")
    for axis, cut in cuts(states):
        if not 0 <= cut.dim < len(shape) or sum(cut.sizes) != shape[cut.dim] or len(cut.sizes) != sizes[axis]:
            raise LayoutError(
                f"{cut} over an axis of {sizes[axis]} places does not cut a tensor of shape {shape}: give one length "
                "for each place, which add up to the dim"
            )
