"""How a program ends."""

from __future__ import annotations

import sys


def has_failed() -> bool:
    """Whether an exception that nobody caught ends the program. A session at a prompt goes on after such."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
