"""Writes in place. The carrier keeps its layout, so that views of it see what was written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from unidist.backends.torch.sharded.moving import plain_in
from unidist.backends.torch.sharded.nested import replaced
from unidist.backends.torch.sharded.tensor import ShardedTensor, as_whole, current, moved, origin_of
from unidist.errors import CapabilityError

Planned = Callable[..., Any]
Tensor = torch.Tensor
# Those whose names do not end in an underscore, and whose first argument is written to.
_OPERATORS = (
    "setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "ifloordiv", "imod", "ilshift",
    "irshift",
)  # fmt: skip
WRITES = frozenset(getattr(Tensor, f"__{name}__") for name in _OPERATORS if hasattr(Tensor, f"__{name}__"))


def writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func in WRITES or (name.endswith("_") and not name.endswith("__"))


def write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], planned: Planned) -> Any:
    """Writes into a carrier, and keeps it.

    Raises:
        CapabilityError: what is written to is a copy that torch would have as a view.
    """
    is_said = kwargs.get("out") is not None
    target = kwargs["out"] if is_said else args[0] if args else kwargs["input"]
    origins = []
    for one in _carriers(target):
        if (origin := origin_of(one)) is not None:
            origin.check_writing(one)
            origins.append(origin)
    out = _into_out(func, args, kwargs, planned) if is_said else _in_place(func, args, kwargs, target, planned)
    for origin in dict.fromkeys(origins):
        origin.give_back()
    return out


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, planned: Planned) -> Any:
    if kwargs.get("inplace"):
        put(target, planned(func, args, {**kwargs, "inplace": False}))
        return target
    if type(target) is ShardedTensor:
        found = planned(func, args, kwargs, in_place=True)
        if found is not NotImplemented:
            return None if func is Tensor.__setitem__ else target
    return _on_wholes(func, args, kwargs)


def _on_wholes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Into wholes, which are put back into the layouts that were there."""
    targets = _carriers(args[0])
    wholes = {}
    for one in targets:
        name = getattr(func, "__name__", str(func))
        with contextlib.nullcontext() if one.spec.whole else one.spec.space.gathering(name):
            wholes[id(one)] = one.whole().clone()
    first = replaced(args[0], ShardedTensor, lambda x: wholes[id(x)])
    rest, named = replaced((args[1:], kwargs), ShardedTensor, ShardedTensor.whole)
    out = func(first, *rest, **named)
    for one in targets:
        put(one, as_whole(one.spec.space, wholes[id(one)]))
    return None if out is None else args[0]


def _into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], planned: Planned) -> Any:
    target = kwargs["out"]
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    # What is written to may be the only carrier.
    result = planned(func, args, rest) if _carriers([args, *rest.values()]) else func(*args, **rest)
    several = isinstance(target, (tuple, list))
    for one, value in zip(target if several else (target,), result if several else (result,), strict=True):
        put(one, value)
    return target


def put(target: Any, value: Any) -> None:
    """A value into a carrier's own layout, or into a plain tensor."""
    if tuple(target.shape) != tuple(value.shape):
        raise CapabilityError(
            f"a tensor of shape {tuple(target.shape)} cannot be written in place with one of {tuple(value.shape)}, "
            "which needs other memory: make a new tensor"
        )
    if type(target) is not ShardedTensor:
        target.copy_(value.whole() if type(value) is ShardedTensor else value)
        return
    space, states = target.spec.space, target.spec.states
    if type(value) is ShardedTensor and value.spec.space is space and value.aside is not None:
        value = current(value)
    if type(value) is ShardedTensor and value.spec.space is space:
        part = moved(value, states)
    else:
        part = plain_in(space, value, states)
    target.local.copy_(part)


def _carriers(value: Any) -> list[ShardedTensor]:
    if type(value) is ShardedTensor:
        return [value]
    return [one for v in value for one in _carriers(v)] if isinstance(value, (tuple, list)) else []
