"""Says how a program ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_raised: list[str] = []


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Around work of all processes: what this one raises in it is reported to those that wait for it."""
    try:
        yield
    except BaseException as error:
        _raised[:] = [f"{type(error).__name__}: {error}".strip().splitlines()[0]]
        raise
    _raised.clear()


def noted() -> str:
    """Returns the text of what was raised in the last such work of this process, or ""."""
    return _raised[0] if _raised else ""


def has_failed() -> bool:
    """Returns whether an exception that nobody caught ends the program.

    A session at a prompt goes on after such.
    """
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
