"""Events: one for every collective that ran. The ledger listens; nothing is recorded unless one does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction

_purpose: ContextVar[str] = ContextVar("unidist_purpose", default="")
_lock = threading.Lock()
_listeners: tuple[Callable[[Event], None], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One collective, as one rank took part in it.

    Attributes:
        op: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, permute or barrier.
        axes: the mesh axes it ran over; () where it ran over a group that no axis names.
        ranks: the ranks of the group, in order.
        bytes: bytes sent by this rank, by the ring bound.
        purpose: what it was for: "gradient", "forward", "metrics", a variable's path...
    """

    op: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    bytes: Fraction
    purpose: str


def listening() -> bool:
    return bool(_listeners)


def emit(event: Event) -> None:
    for listener in _listeners:
        listener(event)


@contextlib.contextmanager
def listen(listener: Callable[[Event], None]) -> Iterator[None]:
    """Calls the listener for every event of this process until the context ends."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            rest = list(_listeners)
            rest.remove(listener)
            _listeners = tuple(rest)


# What the collectives of this thread are for.
purpose: Callable[[], str] = _purpose.get


class _ForPurpose:
    """No generator: a step enters some for each of its collectives, and for each layer with a rule."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = _purpose.set(self._name)

    def __exit__(self, *error: object) -> None:
        _purpose.reset(self._token)


def for_purpose(name: str) -> AbstractContextManager[None]:
    """Names what the collectives inside are for."""
    return _ForPurpose(name)
