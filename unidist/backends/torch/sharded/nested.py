"""Nested arguments of a call of torch: lists, tuples, slices and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import ShardedTensor

# The kinds of a plain tensor; a step that is traced has those of the last one.
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def replaced(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Returns nested lists, tuples, slices and dicts with what is of a kind changed, one after the other."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is slice:
        return slice(*(replaced(one, kind, change) for one in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)) and type(value) is not torch.Size:
        found = [replaced(one, kind, change) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        return {name: replaced(one, kind, change) for name, one in value.items()}
    return value


def innermost(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a carrier, and of the carriers inside of it; another tensor as it is."""
    while isinstance(x, ShardedTensor):
        x = x.local
    return x


def space_of(values: Any) -> Space | None:
    """Returns the space of the first carrier in nested lists, tuples and dicts."""
    if type(values) is ShardedTensor:
        return values.spec.space
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return None
    for value in values:
        found = space_of(value)
        if found is not None:
            return found
    return None
