"""A call of torch with carriers: its plan, found once, and the call on the parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from unidist.backends.torch.sharded import binding, writing
from unidist.backends.torch.sharded.binding import Bound, Call, Composed, Local
from unidist.backends.torch.sharded.moving import invariant, plain_in
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import (
    ShardedTensor,
    copied_from,
    current,
    left,
    moved,
    plain,
    replaced,
    shares,
    version,
    wrap,
)
from unidist.errors import LayoutError
from unidist.propagation.choosing import Operand, choose
from unidist.propagation.layouts import WHOLE, Cut, States

Tensor = torch.Tensor
_SIMPLE = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class Plan:
    """What is known of calls with the same function, layouts, shapes and static arguments.

    Attributes:
        wants: the layout of each tensor of the call; None where it cannot be done in place.
        ready: whether all tensors have them already.
        out: the layout of what comes.
        local: the operation on the parts; None: the function itself.
        places: of the tensors among the arguments; None: they are inside of lists or keywords.
        unknown: whether no rule says what the function does to the wholes that are made for it.
        gathers: the name to count where a whole must be made.
        composed: is called with the arguments, in place of all this.
        mixed: whether there are carriers of several spaces.
        leaves: whether what comes is plain: an invariant space has no wholes.
        native: whether all is to be made whole in an invariant space, so that torch goes on with plain tensors.
    """

    __slots__ = (
        "aliases", "composed", "gathers", "leaves", "local", "mixed", "native", "out", "places", "ready", "spec",
        "unknown", "wants",
    )  # fmt: skip

    def __init__(self) -> None:
        self.wants: tuple[States, ...] | None = ()
        self.ready = self.aliases = self.unknown = self.mixed = self.leaves = self.native = False
        self.out: States = ()
        self.local: Local | None = None
        self.places: tuple[int, ...] | None = None
        self.gathers: str | None = None
        self.composed: Any = None
        self.spec: Any = None


_handlers: dict[Any, Any] = {}
# They write into running statistics, and count no version of these.
_STATISTICS = frozenset((torch.nn.functional.batch_norm, torch.nn.functional.instance_norm))
# Arguments that come before an `input`.
_FIRST = frozenset(("condition", "sorted_sequence", "n"))


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every call of torch that is given a carrier."""
    handler = _handlers.get(func)
    if handler is None:
        handler = binding.DIRECT.get(func) or (_write if writing.writes(func) else planned)
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
    """The call, by its plan. `in_place`: NotImplemented where the first argument would need another layout."""
    tensors: list[Any] = []
    key: list[Any] = [func, in_place]
    known, marked = True, False
    for value in args:
        kind = type(value)
        if kind is ShardedTensor:
            if value.aside is not None:
                value = value if in_place and not tensors else current(value)
                marked = True
            tensors.append(value)
            key.append(value.spec)
            key.append(value.dtype)
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
    space: Space = next(x for x in tensors if type(x) is ShardedTensor).spec.space
    held = tuple(key)
    plan = space.plans.get(held) if known else None
    if plan is None:
        plan = _plan(space, func, args, kwargs, tensors, flat, in_place)
        if known:
            space.keep(held, plan)
    if plan.composed is not None:
        return plan.composed(*args, **kwargs)
    if plan.mixed:
        return _across(func, args, kwargs, tensors, in_place)
    if plan.wants is None:
        return NotImplemented
    if plan.native:
        with nullcontext() if plan.gathers is None else space.gathering(plan.gathers):
            given = replaced((args, kwargs), ShardedTensor, left)
        return func(*given[0], **given[1])
    return _run(space, plan, func, args, kwargs, tensors, plan.ready and not marked)


def _across(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any], in_place: bool) -> Any:
    """A call with carriers of several spaces: parts in one space may be carriers of an invariant one."""
    spaces = list(dict.fromkeys(x.spec.space for x in tensors if type(x) is ShardedTensor))
    outer = [one for one in spaces if not one.invariant]
    if len(outer) > 1:
        raise LayoutError(f"{_name_of(func)} is given tensors of several spaces: make one with space(), and use that")
    space = outer[0] if outer else spaces[0]

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
        if plan.local is not None and not plan.aliases:
            parts = [plain(part) for part in parts]
    elif plan.gathers is not None:
        with space.gathering(plan.gathers):
            parts = _parts(space, plan, tensors)
    else:
        parts = _parts(space, plan, tensors)
    before = [(version(part), part.grad_fn) for part in parts] if plan.unknown else ()
    if plan.local is not None:
        out = plan.local(parts, args, kwargs)
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
    if plan.leaves:
        return replaced(out, Tensor, lambda x: invariant(space, plain(x)))
    if type(out) is Tensor or type(out) is torch.nn.Parameter:
        spec = plan.spec
        if spec is None or spec.local != out.shape:
            spec = plan.spec = space.spec_of(plan.out, out.shape)
        first = tensors[0]
        if parts[0] is out and type(first) is ShardedTensor and first.spec is spec:
            return first  # as torch gives a tensor itself that is of a dtype already: what is set on it stays
        result = wrap(out, spec)
        return result if simple else _marked(result, plan, tensors, parts)

    def wrapped(x: Any) -> Any:
        if type(x) is ShardedTensor and x.spec.space is space:
            return x
        return _marked(wrap(x, space.spec_of(plan.out, x.shape)), plan, tensors, parts)

    return replaced(out, Tensor, wrapped)


def _put_back(func: Any, tensors: list[Any], parts: list[Tensor], before: Sequence[tuple[int, Any]]) -> None:
    """What a function has written into the wholes that were made for it, and past autograd if it did so itself."""
    for k, (x, part, (then, node)) in enumerate(zip(tensors, parts, before, strict=True)):
        wrote = version(part) != then or (k in (1, 2) and func in _STATISTICS)
        if wrote and type(x) is ShardedTensor and part is not x.local:
            with torch.no_grad() if part.grad_fn is node else contextlib.nullcontext():
                writing.put(x, part.clone())


def _parts(space: Space, plan: Plan, tensors: list[Any]) -> list[Tensor]:
    return [
        moved(x, want) if type(x) is ShardedTensor else plain_in(space, x, want)
        for x, want in zip(tensors, plan.wants or (), strict=True)
    ]


def _marked(result: ShardedTensor, plan: Plan, tensors: list[Any], parts: list[Tensor]) -> ShardedTensor:
    """A result that has the memory of a part in another layout is no view of the carrier that torch would see."""
    for x, part in zip(tensors, parts, strict=True):
        if type(x) is not ShardedTensor:
            continue
        if x.aside is not None and x.aside.origin is not None and shares(result.local, part):
            copied_from(result, *x.aside.origin)  # a view of a copy
        elif part is not x.local and (plan.aliases or shares(result.local, part)):
            copied_from(result, x.local, version(x.local))
    return result


def _plan(
    space: Space,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    flat: int,
    in_place: bool,
) -> Plan:
    plan = Plan()
    if any(x.spec.space is not space for x in tensors if type(x) is ShardedTensor):
        plan.mixed = True
        return plan
    if flat == len(tensors):
        places = tuple(k for k, value in enumerate(args) if isinstance(value, Tensor))
        plan.places = places if len(places) == flat else None
    found = binding.TABLE.get(func)
    whole = (WHOLE,) * len(space.sizes)
    bound = found(Call(func, args, kwargs, space)) if found is not None else None
    if isinstance(bound, Composed):
        if in_place:
            plan.wants = None
        plan.composed = None if in_place else bound.run
        return plan
    decision = None if bound is None else _decide(space, bound, tensors, in_place)
    if in_place and decision is None and not all(x.spec.whole for x in tensors if type(x) is ShardedTensor):
        plan.wants = None
        return plan
    if decision is None or bound is None:
        plan.wants, plan.out = (whole,) * len(tensors), whole
    else:
        order = _order(bound, tensors)
        wants = dict(zip(order, decision.wants, strict=True))
        plan.wants = tuple(wants.get(k, whole) for k in range(len(tensors)))
        plan.out, plan.aliases = decision.out, bound.aliases
        if bound.local is not None:
            plan.local = _in_order(bound.local(decision), order, len(tensors))
    have = [x.spec.states if type(x) is ShardedTensor else whole for x in tensors]
    plan.ready = list(plan.wants) == have
    plan.unknown = decision is None and not plan.ready
    is_cut = any(isinstance(state, Cut) for states in have for state in states)
    if not plan.ready and (is_cut if decision is None else decision.gathers):
        plan.gathers = _name_of(func)
    if space.invariant:
        plan.ready = plan.ready and all(type(x) is ShardedTensor for x in tensors)
        plan.leaves = plan.out == whole
        plan.native = plan.leaves and not in_place and all(want == whole for want in plan.wants)
    return plan


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name  # a property's


def _order(bound: Bound, tensors: list[Any]) -> list[int]:
    """Which tensors of the call, in their order there, the operands are. A binding sees the arguments themselves; a
    sum that was joined since stands for one."""
    if bound.operands is None:
        return list(range(len(tensors)))
    order: list[int] = []
    for one in bound.operands:
        stand_in = current(one) if type(one) is ShardedTensor and one.aside is not None else one
        order.append(next(k for k, x in enumerate(tensors) if k not in order and (x is one or x is stand_in)))
    return order


def _in_order(local: Local, order: list[int], count: int) -> Local:
    """A local operation that has its parts in the order of the operands."""
    if order == list(range(count)):
        return local
    return lambda parts, args, kwargs: local([parts[k] for k in order], args, kwargs)


def _decide(space: Space, bound: Bound, tensors: list[Any], in_place: bool) -> Any:
    whole = (WHOLE,) * len(space.sizes)
    operands = [
        Operand(tuple(x.shape), x.spec.states if type(x) is ShardedTensor else whole, x.dtype.itemsize, _sums(x.dtype))
        for x in (tensors[k] for k in _order(bound, tensors))
    ]
    return choose(bound.rule, operands, space.sizes, in_place)


def _sums(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype == torch.int64


def _describe(value: Any, key: list[Any], tensors: list[Any]) -> bool:
    """Appends what a plan depends on; whether it can be kept by that."""
    kind = type(value)
    if kind is ShardedTensor:
        if value.aside is not None:
            value = current(value)
        tensors.append(value)
        key += (value.spec, value.dtype)
    elif kind in _SIMPLE or kind is float:
        key += (kind, value)
    elif isinstance(value, Tensor):
        tensors.append(value)
        key += (value.shape, value.dtype)
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
    """Whether all are, once each was looked at."""
    return min(known, default=True)


def _method(func: Any) -> Any:
    """One that does not go through torch's parsing of arguments, which costs as much as a plan."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return dispatch(func, args, kwargs)

    return method


ShardedTensor.dispatch = staticmethod(dispatch)
# Not __getitem__: torch.tensor([x]) would take a number x for a sequence.
_METHODS = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__pow__", "__neg__",
    "__matmul__", "reshape", "view", "transpose", "permute", "unsqueeze", "contiguous", "expand", "sum",
    "mean", "backward", "detach",
)  # fmt: skip
for _name in _METHODS:
    setattr(ShardedTensor, _name, _method(getattr(Tensor, _name)))


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras asks at each operation: where nothing changes torch gives the tensor itself."""
    if len(args) == 1 and not kwargs:
        wanted = args[0]
        if wanted is self.dtype or (type(wanted) is str and wanted == str(self.device)):
            return self
    return dispatch(Tensor.to, (self, *args), kwargs)


ShardedTensor.to = _to
