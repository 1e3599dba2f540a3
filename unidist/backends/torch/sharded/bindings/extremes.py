"""amax, amin, all and any over a cut dim: each rank's own extreme is gathered, and not what it is of."""

from __future__ import annotations

from typing import Any

import torch

from unidist.backends.torch.ops import TorchOps
from unidist.backends.torch.sharded.moving import carried
from unidist.backends.torch.sharded.tensor import ShardedTensor, moved, plain, wrap
from unidist.propagation.layouts import WHOLE, Cut, States

Tensor = torch.Tensor
Dims = tuple[int, ...]
_differentiable = TorchOps().differentiable


def extreme(name: str, dims: Dims, keeps: bool, x: ShardedTensor, *said: Any, **rest: Any) -> Any:
    """Binds an extreme over dims where one axis cuts one of them."""
    spec = x.spec.joined
    axis, cut = next(
        (axis, state) for axis, state in enumerate(spec.states) if isinstance(state, Cut) and state.dim in dims
    )
    part = moved(x, spec.states, nested=not (x.requires_grad and torch.is_grad_enabled()))
    if not part.shape[cut.dim]:  # an empty part has the least of all, and stays in the graph
        part = torch.cat([part, part.new_full(_one(part, cut.dim), _least(name, part.dtype))], cut.dim)
    own = plain(getattr(torch, name)(part, dims, keepdim=True))
    ones = Cut(cut.dim, (1,) * len(cut.sizes))
    have: States = tuple(ones if k == axis else state for k, state in enumerate(spec.states))
    want: States = tuple(WHOLE if k == axis else state for k, state in enumerate(spec.states))

    def gathered(value: Tensor) -> Tensor:
        return carried(spec.space, value, have, want)

    if own.requires_grad:
        share = _share(name, part, own, dims, cut.dim, gathered)
        own = _differentiable(lambda value: value.view_as(value), lambda gradient: gradient * share, own)
    found = getattr(torch, name)(gathered(own), cut.dim, keepdim=True)
    out = wrap(found, spec.space.spec_of(want, found.shape))
    return out if keeps else out.squeeze(dims)


def _share(name: str, part: Tensor, own: Tensor, dims: Dims, dim: int, gathered: Any) -> Any:
    """Returns the factor of a rank's gradient where ranks tie.

    torch divides a gradient among all that are equal. Ranks that tie divide it evenly: each takes as much more as it
    holds more of them.
    """
    with torch.no_grad():
        count = (part == own).sum(dims, keepdim=True).to(own.dtype)
        every, counts = gathered(own.detach()), gathered(count)
        tied = every == getattr(torch, name)(every, dim, keepdim=True)
        return count * tied.sum(dim, keepdim=True) / (counts * tied).sum(dim, keepdim=True)


def _one(x: Tensor, dim: int) -> tuple[int, ...]:
    return (*x.shape[:dim], 1, *x.shape[dim + 1 :])


def _least(name: str, dtype: torch.dtype) -> Any:
    if dtype == torch.bool or name in ("all", "any"):
        return name in ("all", "amin")
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    least = float("-inf") if dtype.is_floating_point else info.min
    most = float("inf") if dtype.is_floating_point else info.max
    return least if name == "amax" else most
