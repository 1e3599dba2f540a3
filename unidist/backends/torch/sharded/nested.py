"""Nested arguments of a call of torch: lists, tuples, slices and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
