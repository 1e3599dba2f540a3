"""Norms, attention, convolutions, pooling: what is independent along its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State, chunked


def normed(states: Sequence[State], shapes: Sequence[Shape], last: int) -> Iterator[Option]:
    """A norm over the last dims, with a scale and a shift of those dims."""
    (x, *rest) = states
    if isinstance(x, Cut) and x.dim < len(shapes[0]) - last:
        yield Option((x, *(WHOLE,) * len(rest)), x)


def by_channel(states: Sequence[State], shapes: Sequence[Shape], batch: bool) -> Iterator[Option]:
    """Channels in dim 1, with vectors of one number a channel. `batch`: rows (dim 0) are independent too."""
    (x, *rest) = states
    if isinstance(x, Cut) and x.dim == 0 and batch:
        yield Option((x, *(WHOLE,) * len(rest)), x)
    for k, state in enumerate(states):
        if isinstance(state, Cut) and state.dim == (0 if k else 1) and min(state.sizes):
            yield Option((Cut(1, state.sizes), *(Cut(0, state.sizes),) * len(rest)), Cut(1, state.sizes))


def classified(states: Sequence[State], shapes: Sequence[Shape], indices: bool) -> Iterator[Option]:
    """A loss of each row, of its classes in dim 1, with or without a weight of each class.

    Args:
        indices: the target has the class's number in place of a dim of classes.
    """
    x, target, *weights = states
    for state, without in ((x, False), (target, indices)):
        if not isinstance(state, Cut):
            continue
        dim = state.dim + 1 if without and state.dim else state.dim
        if dim != 1:
            given = Cut(dim - 1 if dim else 0, state.sizes)
            wants = (Cut(dim, state.sizes), given if indices else Cut(dim, state.sizes))
            yield Option((*wants, *(WHOLE,) * len(weights)), given)


def attention(
    states: Sequence[State],
    shapes: Sequence[Shape],
    turns: int = 0,
    fixed: frozenset[int] = frozenset(),
    always: bool = False,
) -> Iterator[Option]:
    """Gives softmax(q k^T + mask) v over (..., positions, features): batch and heads are independent.

    So is each position of q. k and v may have fewer heads than q, a whole number of q's each.

    Args:
        turns: places over which cut positions may be turned to heads, or rows; 0: they are not.
        fixed: dims that they are not turned to.
        always: they are turned, whatever it sends.
    """
    q, k, v, *mask = shapes
    ndim = len(q)
    given = list(states[:3])
    order = [0, 1, 2]
    if turns and any(isinstance(one, Cut) and one.dim == ndim - 2 for one in given):
        turned = [(which, dim) for dim in range(ndim - 3, -1, -1) if dim not in fixed for which in (1, 0)]
        turned = [(which, dim) for which, dim in turned if len(shapes[which]) == ndim and shapes[which][dim] >= turns]
        if always and turned:
            order, given = [], []
        order += [which for which, _ in turned]
        given += [chunked(dim, shapes[which][dim], turns) for which, dim in turned]
    for which, state in zip(order, given, strict=True):
        if not isinstance(state, Cut) or len(shapes[which]) != ndim:
            continue
        dim = state.dim
        if dim == ndim - 2 and which == 0:  # positions of q; masks have them too
            yield Option((state, WHOLE, WHOLE, *(masked(m, dim, ndim, state) for m in mask)), state)
        if dim < ndim - 2 and shapes[which][dim] and not q[dim] % shapes[which][dim]:
            times = q[dim] // shapes[which][dim]
            ours = Cut(dim, tuple(n * times for n in state.sizes))
            shared = [_shared(ours, dim, q, one) for one in (k, v)]
            if None not in shared:
                wants = tuple(one for one in shared if one is not None)
                yield Option((ours, *wants, *(masked(m, dim, ndim, ours) for m in mask)), ours)


def _shared(cut: Cut, dim: int, q: Shape, other: Shape) -> State | None:
    """The heads of k or v that the heads of q go with; None where one is needed at two places."""
    if len(other) != len(q) or not q[dim]:
        return None
    if any(n * other[dim] % q[dim] for n in cut.sizes):
        return None
    return Cut(dim, tuple(n * other[dim] // q[dim] for n in cut.sizes))


def masked(mask: Shape, dim: int, ndim: int, cut: Cut) -> State:
    """The state of a mask where a dim of queries, of so many dims, is cut."""
    own = dim - ndim + len(mask)
    return Cut(own, cut.sizes) if own >= 0 and mask[own] == sum(cut.sizes) else WHOLE


def convolution(states: Sequence[State], shapes: Sequence[Shape], transposed: bool, grouped: bool) -> Iterator[Option]:
    """Convolves x (rows, channels in, ...) with w (channels out, channels in, ...), perhaps with a bias.

    Transposed, w is (in, out, ...). No part may be without channels, which frameworks do not convolve.
    """
    x, w, *bias = states
    whole = (WHOLE,) * len(bias)
    to, of = (1, 0) if transposed else (0, 1)
    if isinstance(x, Cut) and x.dim == 0:
        yield Option((x, WHOLE, *whole), x)
    if not grouped:
        for cut, dim in ((w, to), *((one, 0) for one in bias)):
            if isinstance(cut, Cut) and cut.dim == dim and min(cut.sizes):
                columns = Cut(1, cut.sizes)
                yield Option((WHOLE, Cut(to, cut.sizes), *(Cut(0, cut.sizes) for _ in bias)), columns)
        for cut, dim in ((x, 1), (w, of)):
            if isinstance(cut, Cut) and cut.dim == dim and min(cut.sizes):
                yield Option((Cut(1, cut.sizes), Cut(of, cut.sizes), *(PARTIAL for _ in bias)), PARTIAL)
    if x == PARTIAL or PARTIAL in bias:
        yield Option((PARTIAL, WHOLE, *(PARTIAL for _ in bias)), PARTIAL)
    if w == PARTIAL:
        yield Option((WHOLE, PARTIAL, *(PARTIAL for _ in bias)), PARTIAL)
