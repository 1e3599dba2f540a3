"""Features that model axes cut: between layers with cut kernels each rank holds some of them.

A column layer gives a carrier of an invariant space: to the code that goes on with it, it is the whole. Each operation
on it goes by its rule, and what needs all of it gathers. A row layer takes its part off again.

Source: Megatron-LM (Shoeybi et al., arXiv:1909.08053) for column and row layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from unidist import events
from unidist.algebra import Axes
from unidist.backends.torch.sharded import ShardedTensor, Space, wrap
from unidist.backends.torch.sharded.moving import plain_in
from unidist.backends.torch.sharded.tensor import moved, plain
from unidist.keras.patching.compat import get_keras_mask, set_keras_mask
from unidist.keras.torch.activation_redistribute import WHOLE, cut_dim, move
from unidist.keras.torch.context import Frame
from unidist.keras.torch.context import frame as frame_at_work
from unidist.propagation.layouts import WHOLE as ALIKE
from unidist.propagation.layouts import Cut, chunked

# The dim of (batch, sequence, features) that sequence parallelism cuts, and of whatever else has one behind the batch.
SEQUENCE = 1


def space_over(frame: Frame, axes: Axes) -> Space:
    """The ranks along model axes, as the one at work sees them."""
    found: Space | None = frame.world.spaces.get((frame.rank, axes))
    if found is None:
        found = made(frame, axes, invariant=True)
        found.fan = functools.partial(_fanned_together, axes)
    return found


def made(frame: Frame, axes: Axes, *, invariant: bool = False) -> Space:
    """Makes the space of the ranks along axes."""
    world = frame.world
    found = world.spaces[frame.rank, axes] = Space.of(world.backend, world.mesh, (axes,), invariant)
    found.exact = True  # ranks' generators stand alike in a step (drawing.py)
    return found


def _fanned_together(axes: Axes, x: torch.Tensor) -> torch.Tensor | None:
    """A weight on parts of sequences: the sums of all such gradients are one."""
    here = frame_at_work()
    return None if here is None or here.shared is None else here.shared.fanned_out(x, axes)


def carries_rows(x: Any) -> TypeGuard[ShardedTensor]:
    """Returns whether a tensor carries the rows of all data shards."""
    return type(x) is ShardedTensor and not x.spec.space.invariant


def is_around(x: Any, space: Space) -> TypeGuard[ShardedTensor]:
    """Returns whether a tensor's parts may be carriers of a space: it carries rows, or a context's places."""
    return type(x) is ShardedTensor and x.spec.space is not space and (x.spec.space.holds or not x.spec.space.invariant)


def is_cut(x: Any) -> bool:
    """Returns whether model axes cut a tensor's features, also those of this rank's rows."""
    return type(x) is ShardedTensor and (x.spec.space.invariant or type(x.local) is ShardedTensor)


def given(frame: Frame, part: torch.Tensor, dim: int, size: int, axes: Axes) -> torch.Tensor:
    """This rank's features, of `size` along a dim, as all of them."""
    space, dim = space_over(frame, axes), dim % part.ndim
    if is_around(part, space):
        out = given(frame, part.local, dim, size, axes)
        return wrap(out, part.spec.space.spec_of(part.spec.states, out.shape))
    state = chunked(dim, size, space.sizes[0])
    shape = torch.Size((*part.shape[:dim], size, *part.shape[dim + 1 :]))
    out = wrap(part, space.spec((state,), shape))
    out.why = events.purpose()
    return out


def taken(frame: Frame, x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
    """This rank's features of a tensor along a dim."""
    dim %= x.ndim
    space = space_over(frame, axes)
    if is_around(x, space):
        part = taken(frame, x.local, dim, axes)
        return wrap(part, x.spec.space.spec_of(x.spec.states, part.shape))
    if type(x) is ShardedTensor and x.spec.space is space:
        return moved(x, (chunked(dim, x.shape[dim], space.sizes[0]),))
    x = plain(x)
    return move(frame, x, tuple(x.shape), WHOLE, cut_dim(x.ndim, dim, axes))


def comes_cut(frame: Frame, x: torch.Tensor, dim: int, axes: Axes) -> bool:
    """Returns whether each rank has its features along a dim, so that nothing is sent for them."""
    space = space_over(frame, axes)
    while is_around(x, space):
        x = x.local
    if type(x) is not ShardedTensor or x.spec.space is not space:
        return False
    dim %= x.ndim
    return bool(x.spec.states[0] == chunked(dim, x.shape[dim], space.sizes[0]))


def fanned_out(frame: Frame, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Fans out, I -> F over axes: nothing forward, all_reduce backward.

    Of a part of a sequence it is S -> F: all_gather and reduce_scatter. Layers that take one tensor share it, and so
    the one all_reduce of their gradients. Such are query, key and value; gate and up; what an encoder gives to each
    block of a decoder.
    """
    space = space_over(frame, axes)
    if is_around(x, space):
        return wrap(fanned_out(frame, x.local, axes), x.spec)
    if type(x) is ShardedTensor and x.spec.space is space and sequence_of(x):
        return moved(x, (ALIKE,))
    return plain_in(space, plain(x), (ALIKE,))


def sequence_of(x: ShardedTensor) -> bool:
    """Returns whether the places of a sequence are cut, and not features."""
    (state,) = x.spec.states
    return isinstance(state, Cut) and state.dim == SEQUENCE and x.ndim > SEQUENCE + 1


def shared(frame: Frame, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Returns a carrier of all features: S -> F of cut ones, else I -> F.

    S -> F is an all_gather, and a reduce_scatter backward.
    """
    space = space_over(frame, axes)
    if is_around(x, space):
        return wrap(shared(frame, x.local, axes), x.spec)
    if type(x) is ShardedTensor and x.spec.space is space:
        part = moved(x, (ALIKE,))
    else:
        part = plain_in(space, plain(x), (ALIKE,))
    return wrap(part, space.whole(x.shape))


def whole(x: Any) -> Any:
    """A tensor with all of its features; anything else as it is."""
    if not is_cut(x):
        return x
    out = plain(x) if x.spec.space.invariant else wrap(plain(x.local), x.spec)
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(out, whole(mask))
    return out


def on_parts(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Applies a function of each element to a carrier's part, and returns the same carrier of it."""
    return wrap(function(x.local), x.spec)


def axes_of(x: Any) -> Axes:
    """The axes that cut a carrier's features; of a sum or of whole ones none do."""
    inner = x if x.spec.space.invariant else x.local
    space = inner.spec.space
    lines = zip(space.lines, inner.spec.states, strict=True)
    return tuple(axis for line, state in lines if isinstance(state, Cut) for axis in line)
