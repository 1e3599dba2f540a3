"""The plan of a call: the layouts that its rule wants of its tensors, and the layout of what comes."""

from __future__ import annotations

from typing import Any

import torch

from unidist.backends.torch.sharded import binding
from unidist.backends.torch.sharded.binding import Bound, Call, Composed, Local
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import ShardedTensor, current
from unidist.propagation.choosing import Operand, choose
from unidist.propagation.layouts import WHOLE, Cut, States, cuts

Tensor = torch.Tensor


class Plan:
    """Holds what is known of calls with the same function, layouts, shapes and static arguments.

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
        leaves: whether wholes that it gives are made plain, in an invariant space.
        fanned: whether all its carriers are whole. Where one has a gradient, that is partial, as of heads that each
            rank computes: what is made of them is not made plain.
        passes: whether the operation on the parts may be given carriers of another space: it makes a view, or writes.
        uneven: whether parts must not be carriers of another space: other ranks, whose parts have other sizes, may have
            chosen other layouts there.
        native: whether all is to be made whole in an invariant space, so that torch goes on with plain tensors.
    """

    __slots__ = (
        "aliases", "composed", "fanned", "gathers", "leaves", "local", "mixed", "native", "out", "passes", "places",
        "ready", "spec", "uneven", "unknown", "wants",
    )  # fmt: skip

    def __init__(self) -> None:
        self.wants: tuple[States, ...] | None = ()
        self.ready = self.aliases = self.unknown = self.mixed = self.native = self.passes = False
        self.leaves = self.fanned = self.uneven = False
        self.out: States = ()
        self.local: Local | None = None
        self.places: tuple[int, ...] | None = None
        self.gathers: str | None = None
        self.composed: Any = None
        self.spec: Any = None


def make_plan(
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
    plan.fanned = all(x.spec.whole for x in tensors if type(x) is ShardedTensor)
    if isinstance(bound, Composed):
        if in_place:
            plan.wants = None
        plan.composed = None if in_place else bound.run
        plan.leaves = space.invariant
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
        plan.uneven = not (bound.aliases or in_place) and _is_uneven(*plan.wants, plan.out)
        plan.passes = bound.aliases or bound.nests or in_place
        if bound.local is not None:
            plan.local = _in_order(bound.local(decision), order, len(tensors))
    have = [x.spec.states if type(x) is ShardedTensor else whole for x in tensors]
    plan.ready = list(plan.wants) == have
    plan.unknown = decision is None and not plan.ready
    is_cut = any(isinstance(state, Cut) for states in have for state in states)
    is_wanted = bound is not None and bound.gathers_little
    if not plan.ready and not is_wanted and (is_cut if decision is None else decision.gathers):
        plan.gathers = name_of(func)
    if space.invariant:
        plan.ready = plan.ready and all(type(x) is ShardedTensor for x in tensors)
        plan.leaves = not in_place and plan.out == whole
        plan.native = plan.leaves and all(states == whole for states in plan.wants)
    return plan


def _is_uneven(*layouts: States) -> bool:
    return any(len(set(cut.sizes)) > 1 for states in layouts for _, cut in cuts(states))


def name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name  # a property's


def _order(bound: Bound, tensors: list[Any]) -> list[int]:
    """Returns which tensors of the call, in their order there, the operands are.

    A binding sees the arguments themselves; a sum that was joined since stands for one.
    """
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
        Operand(tuple(x.shape), x.spec.states, x.dtype.itemsize, _sums(x.dtype))
        if type(x) is ShardedTensor
        else Operand(tuple(x.shape), whole, x.dtype.itemsize, _sums(x.dtype), space.invariant and x.requires_grad)
        for x in (tensors[k] for k in _order(bound, tensors))
    ]
    return choose(bound.rule, operands, space.sizes, in_place)


def _sums(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype == torch.int64
