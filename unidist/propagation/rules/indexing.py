"""The rules of what is taken from a tensor by places, and of what is put into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State
from unidist.propagation.rules.dims import Mapping
from unidist.propagation.rules.elementwise import aligned


def taken(states: Sequence[State], shapes: Sequence[Shape], mapping: Mapping, at: int = 0) -> Iterator[Option]:
    """x[..., i, ...]: places of one dim by whole numbers, or of some dims by slices.

    Args:
        mapping: where the dims of x go; None for those that the index picks from.
        at: the dim of the result at which the dims of the index begin.
    """
    x, *index = states
    whole = (WHOLE,) * len(index)
    if x == PARTIAL:
        yield Option((PARTIAL, *whole), PARTIAL)
    if isinstance(x, Cut):
        to = mapping[x.dim]
        if to is not None:
            yield Option((x, *whole), Cut(to, x.sizes))
    for state in index:
        if isinstance(state, Cut):
            yield Option((WHOLE, state), Cut(at + state.dim, state.sizes))


def along_dim(states: Sequence[State], shapes: Sequence[Shape], dim: int) -> Iterator[Option]:
    """gather(x, dim, index): an index of as many dims as x, each element of which picks along one dim."""
    x, index = states
    yield from _beside(states, shapes, dim)
    if x == PARTIAL:
        yield Option((PARTIAL, WHOLE), PARTIAL)
    if isinstance(index, Cut) and index.dim == dim:
        yield Option((WHOLE, index), index)


def scattered(
    states: Sequence[State], shapes: Sequence[Shape], dim: int, adds: bool, keeps: bool = True
) -> Iterator[Option]:
    """scatter(x, dim, index, source): all of as many dims.

    Args:
        adds: what is put is added up.
        keeps: it is added to what is there.
    """
    yield from _beside(states, shapes, dim)
    if adds and keeps and len(states) == 3 and shapes[1] == shapes[2]:
        for state in states[1:]:
            if isinstance(state, Cut) and state.dim == dim:
                yield Option((PARTIAL, state, state), PARTIAL)
    if adds and PARTIAL in (states[0], *states[2:]) and not any(isinstance(state, Cut) for state in states):
        yield Option(tuple(WHOLE if k == 1 else PARTIAL for k in range(len(states))), PARTIAL)


def _beside(states: Sequence[State], shapes: Sequence[Shape], dim: int) -> Iterator[Option]:
    """All are cut alike along a dim beside that which the index is of."""
    for state in states:
        if isinstance(state, Cut) and state.dim != dim and len({shape[state.dim] for shape in shapes}) == 1:
            yield Option((state,) * len(states), state)


def indexed_add(states: Sequence[State], shapes: Sequence[Shape], dim: int, adds: bool) -> Iterator[Option]:
    """index_add(x, dim, index, source): an index of one dim, which is that dim of the source."""
    for k, state in enumerate(states):
        if isinstance(state, Cut) and k != 1 and state.dim != dim:
            yield Option((state, WHOLE, state), state)
    if adds and PARTIAL in (states[0], states[2]) and not any(isinstance(state, Cut) for state in states):
        yield Option((PARTIAL, WHOLE, PARTIAL), PARTIAL)


def written(states: Sequence[State], shapes: Sequence[Shape], mapping: Mapping, ndim: int) -> Iterator[Option]:
    """x[...] = value for slices and numbers.

    Args:
        mapping: where the dims of x go in x[...], whose dims are `ndim`; None for those that are picked from.
    """
    x = states[0]
    if x == PARTIAL:
        yield Option((PARTIAL,) * len(states), PARTIAL)
    if isinstance(x, Cut):
        to = mapping[x.dim]
        if to is not None:
            yield Option((x, *(aligned(shape, to, ndim, x.sizes) for shape in shapes[1:])), x)


def looked_up(states: Sequence[State], shapes: Sequence[Shape]) -> Iterator[Option]:
    """Looks up (places, table).

    Of a table that is cut by rows each rank gives zeros for the rows of others.
    """
    index, table = states
    if isinstance(table, Cut):
        yield Option((WHOLE, table), PARTIAL if table.dim == 0 else Cut(len(shapes[0]), table.sizes))
    if isinstance(index, Cut):
        yield Option((index, WHOLE), index)
    if table == PARTIAL:
        yield Option((WHOLE, PARTIAL), PARTIAL)
