"""The leaves of a call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist.keras.patching.compat import backend


def values(value: Any) -> Any:
    """With the values of Keras's variables, which torch's functions take as well."""
    return mapped(lambda x: x.value if isinstance(x, backend.Variable) else x, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A function on all leaves of a call's arguments."""
    if isinstance(value, dict):
        return {key: mapped(function, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        found = [mapped(function, x) for x in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return function(value)
