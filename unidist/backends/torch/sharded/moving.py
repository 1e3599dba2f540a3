"""Moves of local tensors from one layout to another, each with its true adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist.algebra import Sharding
from unidist.backends.torch.ops import TorchOps
from unidist.backends.torch.sharded.space import Space
from unidist.propagation.layouts import WHOLE, Cut, States, cut_dims, offset, whole_shape
from unidist.propagation.moves import Move, moves

Local = Callable[[torch.Tensor], torch.Tensor]
_ops = TorchOps()


def _differentiable(forward: Local, backward: Local, x: torch.Tensor) -> torch.Tensor:
    """A move with its adjoint. Of a part that is a carrier, as of features, all is moved."""
    whole = getattr(x, "whole", None)
    return _ops.differentiable(forward, backward, x if whole is None else whole())


def carried(space: Space, x: torch.Tensor, have: States, want: States) -> torch.Tensor:
    """Moves a local tensor into another layout.

    Gradients go back by the adjoint of each move. Sparse ones move in full.
    """
    if x.layout is not torch.strided and have != want:
        return carried(space, x.to_dense(), have, want).to_sparse(layout=x.layout)
    if space.invariant and (found := _by_algebra(space, x, have, want)) is not None:
        return found
    for move in moves(have, want):
        if space.group(move.axes)[1].size == 1:
            continue
        # torch's own gradient of a slice is right: among zeros
        if move.op == "slice":
            x = _own(space, move.axes[0], _cut(move.after))(x)
        else:
            x = _differentiable(*_both(space, move), x)
    return x


def _both(space: Space, move: Move) -> tuple[Local, Local]:
    """A move and its adjoint."""
    made = _MAKERS[move.op](space, move)
    return made if isinstance(made, tuple) else (made, made)


def _all_reduce(space: Space, move: Move) -> Local:
    return lambda x: space.all_reduce(x, move.axes)


def _mask(space: Space, move: Move) -> Local:
    """The first place's counts; the others stay in the graph, so that they come to what backward sends."""
    if space.group(move.axes)[1].index == 0:
        return _same
    return torch.zeros_like


def _all_gather(space: Space, move: Move) -> tuple[Local, Local]:
    cut = _cut(move.before)
    return _gather(space, move, cut), _scatter(space, move, cut)


def _reduce_scatter(space: Space, move: Move) -> tuple[Local, Local]:
    cut = _cut(move.after)
    return _scatter(space, move, cut), _gather(space, move, cut)


def _gather(space: Space, move: Move, cut: Cut) -> Local:
    names, group = space.group(move.axes)

    def gather(x: torch.Tensor) -> torch.Tensor:
        space.note("all_gather", names, group, (*x.shape[: cut.dim], sum(cut.sizes), *x.shape[cut.dim + 1 :]), x)
        return space.comm.all_gather(x, group, cut.dim, cut.sizes)

    return gather


def _scatter(space: Space, move: Move, cut: Cut) -> Local:
    names, group = space.group(move.axes)

    def scatter(x: torch.Tensor) -> torch.Tensor:
        space.note("reduce_scatter", names, group, x.shape, x)
        return space.comm.reduce_scatter(x, group, cut.dim, cut.sizes, "sum")

    return scatter


def _all_to_all(space: Space, move: Move) -> tuple[Local, Local]:
    before, after = _cut(move.before), _cut(move.after)
    names, group = space.group(move.axes)

    def swap(have: Cut, want: Cut) -> Local:
        def swapped(x: torch.Tensor) -> torch.Tensor:
            space.note("all_to_all", names, group, x.shape, x)
            return space.comm.all_to_all(x, group, want.dim, want.sizes, have.dim, have.sizes)

        return swapped

    return swap(before, after), swap(after, before)


def _embed(space: Space, move: Move) -> tuple[Local, Local]:
    cut = _cut(move.before)
    place = space.places[move.axes[0]]
    start = offset(cut, place)

    def embed(x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros((*x.shape[: cut.dim], sum(cut.sizes), *x.shape[cut.dim + 1 :]))
        out.narrow(cut.dim, start, cut.sizes[place]).copy_(x)
        return out

    return embed, _own(space, move.axes[0], cut)


def _own(space: Space, axis: int, cut: Cut) -> Local:
    """This place's part of a whole."""
    place = space.places[axis]
    start = offset(cut, place)
    return lambda x: x.narrow(cut.dim, start, cut.sizes[place])


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _cut(state: Any) -> Cut:
    assert isinstance(state, Cut)
    return state


_MAKERS: dict[str, Callable[[Space, Move], Local | tuple[Local, Local]]] = {
    "all_reduce": _all_reduce,
    "mask": _mask,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "embed": _embed,
}


def invariant(space: Space, x: torch.Tensor, axes: tuple[int, ...] | None = None) -> torch.Tensor:
    """Returns a whole whose gradient comes whole to every rank, from code that sees no others.

    Each takes its share.

    Args:
        axes: over which it is whole; None: all.
    """
    own = space.fraction(range(len(space.sizes)) if axes is None else axes)
    return x if own == 1 else _differentiable(_same, lambda g: g * own, x)


def fanned(space: Space, x: torch.Tensor, axes: tuple[int, ...] | None = None) -> torch.Tensor:
    """A whole that other code goes on with: that it came from sees its whole gradient."""
    over = tuple(range(len(space.sizes))) if axes is None else axes
    if space.group(over)[1].size == 1:
        return x
    return _differentiable(_same, lambda g: space.all_reduce(g, over), x)


def plain_in(space: Space, x: torch.Tensor, want: States) -> torch.Tensor:
    """A tensor that every rank holds alike, in a layout."""
    if space.invariant and x.requires_grad and torch.is_grad_enabled():
        return _shared(space, x, want)
    return carried(space, x, (WHOLE,) * len(want), want)


def renewed(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns what a rank holds of a tensor that was written to.

    A leaf stays one, with its memory: what is written to it is written past autograd. Only one without a gradient
    becomes another where a gradient came with what was written.
    """
    if not part.is_leaf or (value.requires_grad and not part.requires_grad):
        return value
    part.detach().copy_(value.detach())
    return part


# invariant spaces -----------------------------------------------------------------------------------------------------

# On a plain tensor: what it was fanned out to, by space and lines.
_FANNED = "_unidist_fanned"


def _by_algebra(
    space: Space,
    x: torch.Tensor,
    have: States,
    want: States,
    *,
    from_invariant: bool = False,
    to_invariant: bool = False,
) -> torch.Tensor | None:
    """Moves in an invariant space by the algebra, which programs have too; None where parts are no chunks."""
    src, dst = space.layout(have, not from_invariant), space.layout(want, not to_invariant)
    if src is None or dst is None or space.redistribute is None:
        return None
    shape = tuple(map(int, whole_shape(x.shape, have)))
    if x.is_complex():  # which a backend may not send
        pairs = (Sharding(space.mesh, layout, (*shape, 2)) for layout in (src, dst))
        return torch.view_as_complex(space.redistribute(torch.view_as_real(x.resolve_conj()), *pairs).contiguous())
    return space.redistribute(x, Sharding(space.mesh, src, shape), Sharding(space.mesh, dst, shape))


class _NoView(torch.autograd.Function):
    """The same values, but not as a view.

    A view holds its base, and the base has a note of what it was fanned out to. The two would hold each other, through
    Python and through C++, so that neither sees that nobody else does.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def unshared(space: Space, x: torch.Tensor, have: States) -> torch.Tensor:
    """A part as a plain tensor. The gradient of that is the same on all ranks, so it needs no sum."""
    x = invariant(space, x, tuple(axis for axis, state in enumerate(have) if state == WHOLE))
    whole = (WHOLE,) * len(have)
    if WHOLE not in have and (found := _by_algebra(space, x, have, whole, to_invariant=True)) is not None:
        return found
    for move in moves(have, whole):
        if space.group(move.axes)[1].size == 1:
            continue
        back = _own(space, move.axes[0], move.before) if isinstance(move.before, Cut) else _same
        x = _differentiable(_both(space, move)[0], back, x)
    return x


def _shared(space: Space, x: torch.Tensor, want: States) -> torch.Tensor:
    """A plain tensor in a layout: the ranks' gradients of it are joined."""
    whole = (WHOLE,) * len(want)
    over = tuple(axis for axis, state in enumerate(want) if state == WHOLE and space.sizes[axis] > 1)
    if not over and (lean := _lean(x, want)) is not x:
        part = _shared(space, lean, want)  # dims that were only broadcast are joined once
        return part.expand(*(part.shape[d] if d in cut_dims(want) else n for d, n in enumerate(x.shape)))
    if not over and (found := _by_algebra(space, x, whole, want, from_invariant=True)) is not None:
        return found
    if over:
        x = _fanned_once(space, x, over)
    for axis, state in enumerate(want):
        if space.sizes[axis] == 1 or state == WHOLE:
            continue
        if isinstance(state, Cut):
            back = _gather(space, Move("all_gather", (axis,), state, WHOLE), state)
            x = _differentiable(_own(space, axis, state), back, x)
        else:
            x = _differentiable(_mask(space, Move("mask", (axis,), WHOLE, state)), _same, x)
    return x


def _lean(x: torch.Tensor, want: States) -> torch.Tensor:
    """One of each dim that was only broadcast, and is not cut."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1 and dim not in cut_dims(want):
            x = x.narrow(dim, 0, 1)
    return x


def _fanned_once(space: Space, x: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    """Fans a tensor out once: who else takes it shares the sum of its gradients.

    A variable may be taken again in another step.
    """
    if space.fan is not None and (together := space.fan(x)) is not None:
        return together
    known: dict[Any, torch.Tensor] = {} if x.is_leaf else vars(x).setdefault(_FANNED, {})
    found = known.get((id(space), over))
    if found is None:
        states = tuple(WHOLE if axis in over else "I" for axis in range(len(space.sizes)))
        view = _by_algebra(space, x, (WHOLE,) * len(states), states, from_invariant=True)
        assert view is not None  # nothing is cut
        # Not a view: that holds its base, which would hold it.
        found = known[id(space), over] = _NoView.apply(view)  # type: ignore[no-untyped-call]
    return found
