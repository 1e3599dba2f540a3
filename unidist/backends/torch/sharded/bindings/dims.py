"""Functions whose dims stay, go or change places, and which run along some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import EVERYWHERE, Bound, Call, Composed, Local, bind, binds
from unidist.backends.torch.sharded.nested import PLAIN
from unidist.backends.torch.sharded.tensor import ShardedTensor
from unidist.propagation.choosing import Decision
from unidist.propagation.layouts import cut_dims
from unidist.propagation.rules import dims as rules
from unidist.propagation.rules.dims import Mapping, kept, mapped, placed, without

Tensor = torch.Tensor
Mapper = Callable[[Call], Mapping | None]


def nested_dims(x: Any) -> list[int]:
    """Returns the dims of a carrier that carriers inside of it cut."""
    inner = getattr(x, "local", None)
    return [*cut_dims(inner.spec.states), *nested_dims(inner)] if type(inner) is ShardedTensor else []


def over(
    names: str,
    mapper: Mapper,
    *,
    linear: bool = True,
    averages: bool = False,
    aliases: bool = False,
    local: Callable[[Call, Decision], Local] | None = None,
    filled: Callable[[Call], Sequence[int]] = lambda call: (),
    places: Any = EVERYWHERE,
) -> None:
    """Binds functions of one tensor to a mapping of its dims."""

    def binding(call: Call) -> Bound | None:
        x = call.get(0, "input", "self")
        tensors = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
        if len(tensors) != 1 or tensors[0] is not x:
            return None
        mapping = mapper(call)
        if mapping is None:
            return None
        # Parts of a sum that are rounded, cast or divided as whole numbers do not add up.
        exact = linear and call.kwargs.get("dtype") in (None, x.dtype) and not (averages and not _divides(x.dtype))
        rule = partial(mapped, mapping=mapping, linear=exact, filled=filled(call))
        return Bound(rule, local=None if local is None else partial(local, call), aliases=aliases)

    bind(names, binding, places)


def _divides(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def ndim(call: Call) -> int:
    return len(call.get(0, "input", "self").shape)


def ints(value: Any) -> tuple[int, ...] | None:
    """A number or several, or None where it is something else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(one, int) for one in value):
        return tuple(value)
    return None


def along(place: int, default: int | None = None, *, goes: bool = False, name: str = "dim") -> Mapper:
    """The dim that an argument names must be whole; `goes`: and goes, unless keepdim is said behind it."""

    def mapper(call: Call) -> Mapping | None:
        dims = ints(call.get(place, name, default=default))
        if dims is None:
            return None
        gone = goes and not call.get(place + 1, "keepdim", default=False)
        return without(ndim(call), dims) if gone else kept(ndim(call), dims)

    return mapper


def _permuted(call: Call) -> Mapping | None:
    order = ints(call.rest(1, "dims"))
    return None if order is None else rules.ordered(order)


def _swapped(call: Call) -> Mapping:
    one, other = call.get(1, "dim0", "axis0"), call.get(2, "dim1", "axis1")
    return rules.swapped(ndim(call), one, other)


def _moved(call: Call) -> Mapping | None:
    source, to = ints(call.get(1, "source")), ints(call.get(2, "destination"))
    return None if source is None or to is None else rules.moved(ndim(call), source, to)


def _last_two(call: Call) -> Mapping | None:
    return rules.swapped(ndim(call), -1, -2) if ndim(call) > 1 else None


over("permute", _permuted, aliases=True)
over("transpose swapaxes swapdims", _swapped, aliases=True)
over("moveaxis movedim", _moved, aliases=True)
over("mT adjoint mH H", _last_two, aliases=True)
over("t", lambda c: rules.swapped(2, 0, 1) if ndim(c) == 2 else kept(ndim(c), ()), aliases=True)
over("T", lambda c: rules.swapped(2, 0, 1) if ndim(c) == 2 else None, aliases=True, places=(Tensor,))


def _squeezable(call: Call) -> tuple[int, ...]:
    x, dims = call.get(0, "input"), ints(call.get(1, "dim"))
    asked = range(len(x.shape)) if dims is None else rules.normal(len(x.shape), dims)
    return tuple(dim for dim in asked if x.shape[dim] == 1)


def _squeezed(call: Call, decision: Decision) -> Local:
    """Names the dims: a part may have a length of 1 where the whole has more."""
    gone = _squeezable(call)
    return lambda parts, args, kwargs: parts[0].squeeze(gone)


over("squeeze", lambda c: without(ndim(c), _squeezable(c)), aliases=True, local=_squeezed)
over("unsqueeze", lambda c: rules.inserted(ndim(c), c.get(1, "dim")), aliases=True)


def _expansion(call: Call) -> tuple[int, ...] | None:
    return ints(call.rest(1, "size", "shape"))


def _expanded(call: Call) -> Mapping | None:
    to = _expansion(call)
    return None if to is None else rules.expanded(tuple(call.args[0].shape), to)


def _expanded_part(call: Call, decision: Decision) -> Local:
    cut, to = cut_dims(decision.out), _expansion(call) or ()
    sizes = [-1 if dim in cut else n for dim, n in enumerate(to)]
    return lambda parts, args, kwargs: parts[0].expand(sizes)


over("expand broadcast_to", _expanded, aliases=True, local=_expanded_part)


def _repeated(call: Call) -> Mapping | None:
    times = ints(call.rest(1, "repeats", "sizes", "dims"))
    if times is None:
        return None
    new = len(times) - ndim(call)
    if new < 0:  # tile fills up in front
        times, new = (1,) * -new + times, 0
    return tuple(dim + new if times[dim + new] == 1 else None for dim in range(ndim(call)))


over("repeat tile", _repeated)


@binds("repeat_interleave")
def _interleaved(call: Call) -> Composed | None:
    """By one number, which may be a tensor's."""
    x, times, dim = call.get(0, "input"), call.get(1, "repeats"), call.get(2, "dim")
    is_one = isinstance(times, int) or (type(times) in PLAIN and times.numel() == 1)
    return Composed(_interleave) if is_one and (len(x.shape) == 1 or (dim is not None and len(x.shape))) else None


def _interleave(input: Any, repeats: Any, dim: int | None = None, output_size: int | None = None) -> torch.Tensor:
    times, at = int(repeats), 0 if dim is None else placed(dim, len(input.shape))
    if times < 0:
        raise RuntimeError("repeats can not be negative")
    apart = input.unsqueeze(at + 1).expand(*input.shape[: at + 1], times, *input.shape[at + 1 :])
    return apart.flatten(at, at + 1)  # type: ignore[no-any-return]


def _flipped(call: Call) -> Mapping | None:
    dims = ints(call.rest(1, "dims"))
    return None if dims is None else kept(ndim(call), dims)


def _rolled(call: Call) -> Mapping | None:
    dims = ints(call.get(2, "dims", default=()))
    return kept(ndim(call), dims or range(ndim(call))) if dims is not None else None


over("flip", _flipped)
over("roll", _rolled)
over("split chunk", along(2, 0), aliases=True)
over("split_with_sizes tensor_split", along(2, 0), aliases=True)
over("unbind", lambda c: without(ndim(c), ints(c.get(1, "dim", default=0)) or ()), aliases=True)
over("select", lambda c: without(ndim(c), (c.get(1, "dim"),)), aliases=True)
over("narrow", along(1), aliases=True)
over("cumsum", along(1))
over("cumprod logcumsumexp cummax cummin", along(1), linear=False)
over("sort argsort", along(1, -1), linear=False)
over("topk", along(2, -1), linear=False)
over("kthvalue", along(2, -1, goes=True), linear=False)
over("median nanmedian mode", along(1, goes=True), linear=False)
over("argmax argmin prod", along(1, goes=True), linear=False)
over("diff", along(2, -1))
over("tril triu", lambda c: kept(ndim(c), (-1, -2)))
over("glu", along(1, -1), linear=False, places=(F,))


@binds("pad", (F,))
def _pad(call: Call) -> Bound | None:
    """Binds pad.

    A constant that is not 0 would be added by each rank's part of a sum. Other modes take no empty channels.
    """
    x, pads = call.get(0, "input"), ints(call.get(1, "pad"))
    tensors = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
    if pads is None or not ndim(call) or len(tensors) != 1 or tensors[0] is not x:
        return None
    is_constant, count = call.get(2, "mode", default="constant") == "constant", len(pads) // 2
    mapping = kept(ndim(call), [-1 - k for k in range(count) if pads[2 * k] or pads[2 * k + 1]])
    filled = () if is_constant else range(int(ndim(call) == count + 2), ndim(call))
    return Bound(partial(mapped, mapping=mapping, linear=not (is_constant and call.get(3, "value")), filled=filled))
