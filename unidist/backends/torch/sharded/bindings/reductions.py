"""Sums, means, extremes, variances; softmax. Over a cut dim most are made of sums and extremes."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import Binding, Bound, Call, Composed, binds
from unidist.backends.torch.sharded.bindings.dims import ints
from unidist.backends.torch.sharded.bindings.extremes import extreme
from unidist.backends.torch.sharded.tensor import ShardedTensor
from unidist.propagation.layouts import cut_dims
from unidist.propagation.rules.dims import kept, mapped, normal, reduction

Tensor = torch.Tensor
Dims = tuple[int, ...]


def dims_of(call: Call, place: int = 1) -> Dims | None:
    """The dims that go: all of them where none is named; None where what is named is no number."""
    x, said = call.args[0], call.get(place, "dim")
    if said is None or said in ((), []):
        return tuple(range(len(x.shape)))
    dims = ints(said)
    return None if dims is None else normal(len(x.shape), dims)


def cuts_of(x: Any, dims: Dims) -> int:
    """Returns how many axes cut one of the dims."""
    return sum(dim in dims for dim in cut_dims(x.spec.states)) if type(x) is ShardedTensor else 0


def _keeps(call: Call, place: int = 2) -> bool:
    return bool(call.get(place, "keepdim", default=False))


def _alone(call: Call) -> bool:
    """The call has one tensor, its first argument."""
    values = (*call.args, *call.kwargs.values())
    return bool(call.args) and isinstance(call.args[0], Tensor) and sum(isinstance(v, Tensor) for v in values) == 1


@binds("sum")
def _sum(call: Call) -> Bound | Composed | None:
    dims = dims_of(call) if _alone(call) else None
    if dims is None:
        return None
    if call.kwargs.get("dtype") not in (None, call.args[0].dtype):
        return Composed(partial(_sum_of_cast, dims, _keeps(call)))
    return Bound(partial(reduction, dims=dims, keepdim=_keeps(call), linear=True))


def _sum_of_cast(dims: Dims, keeps: bool, x: Any, *said: Any, dtype: torch.dtype, **rest: Any) -> Any:
    """Sums a cast: a part of a sum is cast by its own rule."""
    return torch.sum(x.to(dtype), dims, keepdim=keeps, dtype=dtype)


@binds("mean")
def _mean(call: Call) -> Bound | Composed | None:
    dims = dims_of(call) if _alone(call) else None
    if dims is None:
        return None
    dtype = call.kwargs.get("dtype") or call.args[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return None  # torch says what is wrong
    if cuts_of(call.args[0], dims) or dtype != call.args[0].dtype:
        return Composed(partial(mean, dims, _keeps(call)))
    return Bound(partial(reduction, dims=dims, keepdim=_keeps(call), linear=True))


def mean(dims: Dims, keeps: bool, x: Any, *said: Any, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    """The partial sum over the global count."""
    return torch.sum(x, dims, keepdim=keeps, dtype=dtype) / prod(x.shape[dim] for dim in dims)


def _extreme(name: str) -> Binding:
    def binding(call: Call) -> Bound | Composed | None:
        if not _alone(call):
            return None
        dims = dims_of(call)
        if dims is None or (not dims and name in ("all", "any")) or not prod(call.args[0].shape):
            return None
        times = cuts_of(call.args[0], dims)
        if times == 1:
            return Composed(partial(extreme, name, dims, _keeps(call)))
        return None if times else Bound(partial(reduction, dims=dims, keepdim=_keeps(call), linear=False))

    return binding


for _name in ("amax", "amin", "all", "any"):
    binds(_name)(_extreme(_name))


def _with_places(name: str) -> Binding:
    """max and min: of all, of two tensors, or along a dim with the places."""

    def binding(call: Call) -> Bound | Composed | None:
        if len(call.args) == 1 and not call.kwargs:
            return _extreme(name)(call)
        if not _alone(call):
            return Composed(getattr(torch, name.replace("a", "", 1) + "imum"))
        dims = ints(call.get(1, "dim"))
        if dims is None:
            return None
        return Bound(partial(reduction, dims=normal(len(call.args[0].shape), dims), keepdim=_keeps(call), linear=False))

    return binding


binds("max")(_with_places("amax"))
binds("min")(_with_places("amin"))


def _spread(name: str) -> Binding:
    """Binds var and std: (x, unbiased) and (x, dim, unbiased, keepdim) beside (x, dim, correction=, ...).

    The last one takes keepdim= too.
    """

    def binding(call: Call) -> Bound | Composed | None:
        if not _alone(call):
            return None
        args = list(call.args[1:])
        unbiased = call.kwargs.get("unbiased")
        if args and isinstance(args[0], bool):
            unbiased = args.pop(0)
        elif len(args) > 1:
            unbiased = args.pop(1)
        plain = Call(call.func, (call.args[0], *args), call.kwargs, call.space)
        dims = dims_of(plain)
        if dims is None or call.args[0].is_complex():
            return None
        correction = call.kwargs.get("correction")
        less = 1 if correction is None else correction
        less = less if unbiased is None else int(unbiased)
        made = partial(std if name == "std" else var, dims, _keeps(plain), less)
        if cuts_of(call.args[0], dims):
            return Composed(made)

        func = call.func

        def local(parts: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # torch warns of what has no elements.
            return func(parts[0], *args[1:], **kwargs) if parts[0].numel() else made(parts[0])

        rule = partial(reduction, dims=dims, keepdim=_keeps(plain), linear=False)
        return Bound(rule, local=lambda decision: local)

    return binding


for _name in ("var", "std"):
    binds(_name)(_spread(_name))


def var(dims: Dims, keeps: bool, less: float, x: Any, *said: Any, **rest: Any) -> Any:
    n = prod(x.shape[dim] for dim in dims)
    return torch.sum(torch.square(x - mean(dims, True, x)), dims, keepdim=keeps) / max(0, n - less)


def std(dims: Dims, keeps: bool, less: float, x: Any, *said: Any, **rest: Any) -> Any:
    """torch's gradient is 0 where there is no spread; that of a root is none."""
    of = var(dims, keeps, less, x)
    flat = of == 0
    return torch.where(flat, of, torch.sqrt(torch.where(flat, 1, of)))


@binds("logsumexp")
def _logsumexp(call: Call) -> Bound | Composed | None:
    dims = dims_of(call) if _alone(call) and not call.args[0].is_complex() else None
    if dims is None or not prod(call.args[0].shape) or cuts_of(call.args[0], dims) > 1:
        return None
    if cuts_of(call.args[0], dims):
        return Composed(partial(logsumexp, dims, _keeps(call)))
    return Bound(partial(reduction, dims=dims, keepdim=_keeps(call), linear=False))


def logsumexp(dims: Dims, keeps: bool, x: Any, *said: Any, **rest: Any) -> Any:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    most = torch.amax(x, dims, keepdim=True).detach()
    most = torch.where(torch.isfinite(most), most, 0)
    out = torch.log(torch.sum(torch.exp(x - most), dims, keepdim=True)) + most
    return out if keeps else out.squeeze(dims)


@binds("softmax log_softmax softmin")
def _softmax(call: Call) -> Bound | Composed | None:
    said = ints(call.get(1, "dim")) if _alone(call) else None
    if said is None:
        return None
    x = call.args[0]
    dims = normal(len(x.shape), said)
    if not cuts_of(x, dims):
        return Bound(partial(mapped, mapping=kept(len(x.shape), dims), linear=False))
    if call.func is F.softmin or not prod(x.shape):
        return None
    logs = call.func in (F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
    to = next((v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)), x.dtype)
    return Composed(partial(log_softmax if logs else softmax, dims, to))


def softmax(dims: Dims, to: torch.dtype, x: Any, *said: Any, **rest: Any) -> Any:
    x = x.to(to)
    raised = torch.exp(x - torch.amax(x, dims, keepdim=True).detach())
    return raised / torch.sum(raised, dims, keepdim=True)


def log_softmax(dims: Dims, to: torch.dtype, x: Any, *said: Any, **rest: Any) -> Any:
    x = x.to(to)
    return x - logsumexp(dims, True, x)


@binds("count_nonzero")
def _count(call: Call) -> Composed | None:
    dims = dims_of(call) if _alone(call) else None
    return None if dims is None else Composed(lambda x, *said, **rest: torch.sum(x != 0, dims))
