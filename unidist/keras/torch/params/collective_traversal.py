"""Walks over a model's whole values, which are collectives: who breaks off owes the others the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

# How many whole values this walk has come by, and how many of them an earlier, broken one has read.
_walk = SimpleNamespace(met=0, read=0, is_again=False)


@contextlib.contextmanager
def walking() -> Iterator[None]:
    """A walk from the first value on."""
    _walk.met = _walk.read = 0
    try:
        yield
    finally:
        _walk.read = 0


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """The same walk from its start, after it broke off: what was read then is not asked for again."""
    _walk.read, _walk.met, _walk.is_again = _walk.met, 0, True
    try:
        yield
    finally:
        _walk.read, _walk.is_again = 0, False


def is_again() -> bool:
    """Returns whether this is a walk that broke off before, and is gone to its end for the others."""
    return bool(_walk.is_again)


def was_read() -> bool:
    """Returns whether the walk's value was read before it broke off. Called once for each value."""
    _walk.met += 1
    return bool(_walk.met <= _walk.read)
