"""Checks of what a caller gave."""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any


def whole_number(value: Any) -> int | None:
    """The int of an int (NumPy's too); None for everything else, True and 2.0 included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are kept where it is copied or sent.

    What it has found out is left out, as its hash, which is another in each process.
    """
    return {field.name: getattr(value, field.name) for field in fields(value)}
