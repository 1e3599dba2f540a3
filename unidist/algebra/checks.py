"""Checks of what a caller gave."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(value: Any) -> int | None:
    """The int of an int (NumPy's too); None for everything else, True and 2.0 included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
