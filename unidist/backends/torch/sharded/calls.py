"""A call of torch with carriers: its plan, found once, and the call on the parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from unidist.backends.torch.sharded import binding, writing
from unidist.backends.torch.sharded.moving import plain_in
from unidist.backends.torch.sharded.nested import PLAIN, replaced
from unidist.backends.torch.sharded.plans import Plan, make_plan, name_of
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import (
    Origin,
    ShardedTensor,
    aside_of,
    current,
    follow,
    left,
    moved,
    origin_of,
    plain,
    shares,
    version,
    wrap,
)
from unidist.errors import LayoutError
from unidist.propagation.layouts import States

Tensor = torch.Tensor
_SIMPLE = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_handlers: dict[Any, Any] = {}
# They write into running statistics, and count no version of these.
_STATISTICS = frozenset((torch.nn.functional.batch_norm, torch.nn.functional.instance_norm))
# Arguments that come before an `input`.
_FIRST = frozenset(("condition", "sorted_sequence", "n"))


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every call of torch that is given a carrier."""
    handler = _handlers.get(func)
    if handler is None:
        handler = binding.direct(func) or (_write if writing.writes(func) else planned)
        _handlers[func] = handler
    if kwargs:
        if not args and "input" in kwargs and _FIRST.isdisjoint(kwargs):
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        if handler is planned and (kwargs.get("out") is not None or kwargs.get("inplace")):
            handler = _write
    return handler(func, args, kwargs)


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return writing.write(func, args, kwargs, planned)


def planned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool = False) -> Any:
    """Makes the call, by its plan.

    `in_place`: NotImplemented where the first argument would need another layout.
    """
    tensors: list[Any] = []
    key: list[Any] = [func, in_place]
    known, marked = True, False
    for value in args:
        kind = type(value)
        if kind is ShardedTensor:
            if value.aside is not None:
                value = value if in_place and not tensors else current(value)
                marked = True
                if type(value) is not ShardedTensor:
                    _describe(value, key, tensors)
                    continue
            tensors.append(value)
            key.append(value.spec)
            key.append(value.dtype)
            if type(value.local) is ShardedTensor:
                key.append(value.local.spec)
        elif kind is float:
            key.append(kind)
            key.append(2 if value == 0 else value - value == 0)  # zero, finite, or not
        elif kind in _SIMPLE:
            key.append(kind)
            key.append(value)
        else:
            known = _describe(value, key, tensors) and known
    flat = len(tensors)
    for name, value in kwargs.items():
        key.append(name)
        known = _describe(value, key, tensors) and known
    first = next((x for x in tensors if type(x) is ShardedTensor), None)
    if first is None:  # sums that others have joined, and gone on with plainly
        given = replaced((args, kwargs), ShardedTensor, current)
        return func(*given[0], **given[1])
    space: Space = first.spec.space
    held = tuple(key)
    plan = space.plans.get(held) if known else None
    if plan is None:
        plan = make_plan(space, func, args, kwargs, tensors, flat, in_place)
        if known:
            space.keep(held, plan)
    leaves = plan.leaves and not (plan.fanned and any(type(x) is ShardedTensor and x.requires_grad for x in tensors))
    if plan.composed is not None:
        out = plan.composed(*args, **kwargs)
        return replaced(out, ShardedTensor, _left_whole) if leaves else out
    if plan.mixed:
        return _across(func, args, kwargs, tensors, in_place)
    if plan.wants is None:
        return NotImplemented
    if leaves and plan.native and any(x.requires_grad for x in tensors):
        with nullcontext() if plan.gathers is None else space.gathering(plan.gathers):
            wholes = [left(x) if type(x) is ShardedTensor else x for x in tensors]
        return _with_parts(plan, None, func, args, kwargs, tensors, wholes)
    out = _run(space, plan, func, args, kwargs, tensors, plan.ready and not marked)
    return replaced(out, ShardedTensor, _left_whole) if leaves else out


def _left_whole(x: ShardedTensor) -> Any:
    """A whole as a plain tensor, but for a view: what is written into that goes back."""
    return left(x) if x.spec.whole and origin_of(x) is None else x


def _across(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any], in_place: bool) -> Any:
    """A call with carriers of several spaces: parts in one space may be carriers of an invariant one."""
    spaces = list(dict.fromkeys(x.spec.space for x in tensors if type(x) is ShardedTensor))
    outer = [one for one in spaces if not one.invariant]
    if len(outer) > 1:
        raise LayoutError(f"{name_of(func)} is given tensors of several spaces: make one with space(), and use that")
    space = outer[0] if outer else next((one for one in spaces if one.holds), spaces[0])

    def entered(x: ShardedTensor) -> Any:
        if x.spec.space is space:
            return x
        return left(x) if space.invariant else wrap(x, space.whole(x.shape))

    given = replaced((args, kwargs), ShardedTensor, entered)
    return planned(func, given[0], given[1], in_place)


def _run(
    space: Space,
    plan: Plan,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    simple: bool,
) -> Any:
    """`simple`: nothing moves, and no operand is a copy where torch would have a view."""
    if plan.ready:
        parts = [x.local if type(x) is ShardedTensor else x for x in tensors]
    elif plan.gathers is not None:
        with space.gathering(plan.gathers):
            parts = _parts(space, plan, tensors)
    else:
        parts = _parts(space, plan, tensors)
    if plan.uneven or (plan.local is not None and not plan.passes):
        parts = [plain(part) for part in parts]
    out = _with_parts(plan, plan.local, func, args, kwargs, tensors, parts)
    if type(out) in PLAIN:
        spec = plan.spec
        if spec is None or spec.local != out.shape:
            spec = plan.spec = space.spec_of(plan.out, out.shape)
        first = tensors[0]
        if parts[0] is out and type(first) is ShardedTensor and first.spec is spec:
            return first  # as torch gives a tensor itself that is of a dtype already: what is set on it stays
        result = wrap(out, spec)
        if space.invariant:
            result.why = next((x.why for x in tensors if type(x) is ShardedTensor and x.why), "")
        return result if simple else _marked(result, plan, tensors, parts)

    def wrapped(x: Any) -> Any:
        if type(x) is ShardedTensor and x.spec.space is space:
            return x
        return _marked(wrap(x, space.spec_of(plan.out, x.shape)), plan, tensors, parts)

    return replaced(out, Tensor, wrapped)


def _with_parts(
    plan: Plan,
    local: binding.Local | None,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    parts: list[Tensor],
) -> Any:
    before = [(version(part), part.grad_fn) for part in parts] if plan.unknown else ()
    if local is not None:
        out = local(parts, args, kwargs)
    elif plan.places is not None:
        given = list(args)
        for place, part in zip(plan.places, parts, strict=False):
            given[place] = part
        out = func(*given, **kwargs)
    else:
        following = iter(parts)
        given, named = replaced((args, kwargs), Tensor, lambda x: next(following))
        out = func(*given, **named)
    if before:
        _put_back(func, tensors, parts, before)
    return out


def _put_back(func: Any, tensors: list[Any], parts: list[Tensor], before: Sequence[tuple[int, Any]]) -> None:
    """Puts back what a function wrote into the wholes made for it.

    It does so past autograd if the function did so itself.
    """
    for k, (x, part, (then, node)) in enumerate(zip(tensors, parts, before, strict=True)):
        wrote = version(part) != then or (k in (1, 2) and func in _STATISTICS)
        if wrote and type(x) is ShardedTensor and part is not x.local and not (x.aside and follow(x, x.aside)):
            with torch.no_grad() if part.grad_fn is node else nullcontext():
                writing.put(x, part.clone())


def part_in(space: Space, x: Tensor, want: States) -> Tensor:
    """Returns this rank's part, in a layout, of a carrier or of a tensor that every rank holds alike."""
    return moved(x, want, nested=True) if type(x) is ShardedTensor else plain_in(space, x, want)


def _parts(space: Space, plan: Plan, tensors: list[Any]) -> list[Tensor]:
    parts = [part_in(space, x, want) for x, want in zip(tensors, plan.wants or (), strict=True)]
    if plan.passes and type(tensors[0]) is ShardedTensor and plan.wants and plan.wants[0] == tensors[0].spec.states:
        parts[0] = tensors[0].local  # of which a view is made, or which is written to
    return parts


def _marked(result: ShardedTensor, plan: Plan, tensors: list[Any], parts: list[Tensor]) -> ShardedTensor:
    """Marks a result that has the memory of a part in another layout.

    It is no view of the carrier that torch would see.
    """
    for x, part, want in zip(tensors, parts, plan.wants or (), strict=True):
        if type(x) is not ShardedTensor:
            continue
        if (origin := origin_of(x)) is not None and shares(result.local, x.local):
            aside_of(result).origin = origin  # a view of a copy
        elif part is not x.local and (plan.aliases or shares(result.local, part)):
            aside_of(result).origin = Origin(x, part, want)
    return result


def _describe(value: Any, key: list[Any], tensors: list[Any]) -> bool:
    """Appends what a plan depends on; whether it can be kept by that."""
    kind = type(value)
    if kind is ShardedTensor:
        if value.aside is not None and type(now := current(value)) is not ShardedTensor:
            return _describe(now, key, tensors)
        value = value if value.aside is None else now
        tensors.append(value)
        key += (value.spec, value.dtype, value.local.spec if type(value.local) is ShardedTensor else None)
    elif kind in _SIMPLE or kind is float:
        key += (kind, value)
    elif isinstance(value, Tensor):
        tensors.append(value)
        key += (value.shape, value.dtype, value.requires_grad)
    elif kind is slice:
        key.append(kind)
        return _all(_describe(one, key, tensors) for one in (value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list)):
        key += (kind, len(value))
        return _all(_describe(one, key, tensors) for one in value)
    elif isinstance(value, dict):
        key += (kind, *value)
        return _all(_describe(one, key, tensors) for one in value.values())
    else:
        key += (kind, value)
        try:
            hash(value)
        except TypeError:
            return False
    return True


def _all(known: Iterable[bool]) -> bool:
    """Returns whether all are, once each was looked at."""
    return min(known, default=True)


ShardedTensor.dispatch = staticmethod(dispatch)
