"""Other shapes of the same elements; several tensors behind each other."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from unidist.backends.torch.sharded.binding import Bound, Call, Local, binds
from unidist.backends.torch.sharded.bindings.dims import ints
from unidist.propagation.choosing import Decision
from unidist.propagation.layouts import Shape, local_shape
from unidist.propagation.rules.dims import placed
from unidist.propagation.rules.views import joined, resolved, view

Tensor = torch.Tensor


def _to_shape(call: Call, shape: Any) -> Bound | None:
    """To a global shape; a part takes its own share of it."""
    found = ints(shape)
    if found is None:
        return None
    x, space = call.args[0], call.space
    to: Shape = resolved(found, prod(x.shape))
    if prod(to) != prod(x.shape):
        return None  # torch says what is wrong

    def local(decision: Decision) -> Local:
        sizes = local_shape(to, decision.out, space.places)
        return lambda parts, args, kwargs: parts[0].reshape(sizes)

    return Bound(partial(view, shape=to), operands=(x,), local=local, aliases=True)


@binds("reshape view", (torch, Tensor))
def _reshape(call: Call) -> Bound | None:
    if not isinstance(call.args[0], Tensor):
        return None
    return _to_shape(call, call.rest(1, "shape", "size"))


@binds("flatten ravel", (torch, Tensor))
def _flatten(call: Call) -> Bound | None:
    shape = tuple(call.args[0].shape)
    if not shape:
        return _to_shape(call, (1,))
    first, last = (
        placed(call.get(place, name, default=d), len(shape))
        for place, name, d in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    return _to_shape(call, (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]))


@binds("unflatten", (torch, Tensor))
def _unflatten(call: Call) -> Bound | None:
    shape, dim, sizes = tuple(call.args[0].shape), call.get(1, "dim"), ints(call.rest(2, "sizes"))
    if not isinstance(dim, int) or sizes is None or not shape:
        return None
    dim = placed(dim, len(shape))
    return _to_shape(call, (*shape[:dim], *resolved(sizes, shape[dim]), *shape[dim + 1 :]))


@binds("cat concat concatenate stack", (torch,))
def _joined(call: Call) -> Bound | None:
    tensors = call.get(0, "tensors")
    dim = call.get(1, "dim", "axis", default=0)
    if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int) or call.kwargs.get("out") is not None:
        return None
    new = call.func is torch.stack
    ndim = max(len(x.shape) for x in tensors) + new
    return Bound(partial(joined, dim=placed(dim, ndim), new=new)) if ndim else None
