"""Operations on one tensor whose dims stay, go or change places: reductions, permutations, runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, Cut, Shape, State

# Where each dim goes; None where the operation must see it whole.
Mapping = tuple[int | None, ...]


def mapped(
    states: Sequence[State], shapes: Sequence[Shape], mapping: Mapping, linear: bool, filled: Sequence[int] = ()
) -> Iterator[Option]:
    """`linear`: a sum of results is the result of the sum. `filled`: dims that may be empty on no rank."""
    (state,) = states
    if state == PARTIAL and linear:
        yield Option((PARTIAL,), PARTIAL)
    if isinstance(state, Cut):
        to = mapping[state.dim]
        if to is not None and (state.dim not in filled or min(state.sizes)):
            yield Option((state,), Cut(to, state.sizes))


def reduction(
    states: Sequence[State], shapes: Sequence[Shape], dims: tuple[int, ...], keepdim: bool, linear: bool
) -> Iterator[Option]:
    """`linear`: sums of parts add up to the sum, so a cut dim that goes leaves a partial result."""
    (state,) = states
    if linear and (state == PARTIAL or (isinstance(state, Cut) and state.dim in dims)):
        yield Option((state,), PARTIAL)
    ndim = len(shapes[0])
    yield from mapped(states, shapes, kept(ndim, dims) if keepdim else without(ndim, dims), linear=False)


# Mappings ----------------------------------------------------------------------------------------------------------


def kept(ndim: int, seen: Iterable[int]) -> Mapping:
    """All dims stay; those that are `seen` whole."""
    gone = normal(ndim, seen)
    return tuple(None if dim in gone else dim for dim in range(ndim))


def without(ndim: int, gone: Iterable[int]) -> Mapping:
    """The dims that are left move up."""
    left = [dim for dim in range(ndim) if dim not in normal(ndim, gone)]
    return tuple(left.index(dim) if dim in left else None for dim in range(ndim))


def inserted(ndim: int, at: int) -> Mapping:
    """A new dim comes at a place."""
    at = placed(at, ndim + 1)
    return tuple(dim + (dim >= at) for dim in range(ndim))


def ordered(order: Sequence[int]) -> Mapping:
    """A permutation: the dim `order[k]` becomes dim k."""
    ndim = len(order)
    out = [0] * ndim
    for place, dim in enumerate(order):
        out[dim % ndim] = place
    return tuple(out)


def swapped(ndim: int, one: int, other: int) -> Mapping:
    order = list(range(ndim))
    if ndim:
        one, other = placed(one, ndim), placed(other, ndim)
        order[one], order[other] = other, one
    return tuple(order)


def moved(ndim: int, source: Sequence[int], destination: Sequence[int]) -> Mapping:
    to = {d % ndim: s % ndim for s, d in zip(source, destination, strict=True)}
    rest = iter(dim for dim in range(ndim) if dim not in to.values())
    return ordered([to[place] if place in to else next(rest) for place in range(ndim)])


def expanded(shape: Shape, to: Sequence[int]) -> Mapping:
    """A dim of 1 that becomes longer must be whole."""
    new = len(to) - len(shape)
    return tuple(dim + new if to[dim + new] in (-1, n) else None for dim, n in enumerate(shape))


def normal(ndim: int, dims: Iterable[int]) -> tuple[int, ...]:
    """Dims from 0; a number has none.

    Raises:
        IndexError: there is no such dim.
    """
    return tuple(sorted({placed(dim, ndim) for dim in dims})) if ndim else ()


def placed(dim: int, ndim: int) -> int:
    """One dim from 0.

    Raises:
        IndexError: there is no such dim.
    """
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim
