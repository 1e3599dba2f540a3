"""Finds the call that a message belongs to: calls are numbered, what members agree on is marked."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from typing import Any

from unidist.backends.checking import checks_all
from unidist.backends.desync import Call

# What all members must agree on: the collective, the shape of the local tensor (None along a dim that may differ), its
# dtype, further arguments as (name, value).
Key = tuple[Hashable, ...]

# Uses of one call that are compared before a transport's own collective starts; and how many calls are kept apart.
FIRST = 2
_KEPT = 4096
# Tags that nobody else uses on a group: above the small ones of a user's own messages.
_LOWEST = 1 << 10
_NUMBERS, _MARK_BITS = 1 << 14, 16


class _Seen:
    __slots__ = ("kinds", "mark", "uses")

    def __init__(self, mark: int) -> None:
        self.mark, self.uses = mark, 0
        self.kinds: dict[str, int] = {}


class Calls:
    """The calls begun on one transport. All members come to the same calls in the same order.

    A message's tag is drawn from the number and from a mark of the key: what two members send for different calls finds
    no receiver, and is never read as something else.

    Attributes:
        number: how many were begun.
        is_fresh: whether members shall compare the last one before a transport's own collective starts.
    """

    __slots__ = ("_all", "_drawn", "_mark", "_seen", "is_fresh", "number")

    def __init__(self) -> None:
        self.number = 0
        self.is_fresh = False
        self._all = checks_all()
        self._drawn = self._mark = 0
        self._seen: dict[Key, _Seen] = {}

    def begin(self, key: Key) -> tuple[int, dict[str, int]]:
        """Begins the next call. Gives its number, and for each purpose that of its text in the record.

        The record is this process's (unidist.flight).
        """
        self.number = number = self.number + 1
        found = self._seen.get(key)
        if found is None:
            found = self._learn(key)
        found.uses = uses = found.uses + 1
        self._mark = found.mark
        self.is_fresh = uses <= FIRST or self._all
        return number, found.kinds

    def _learn(self, key: Key) -> _Seen:
        if len(self._seen) >= _KEPT:
            self._seen.clear()
        found = self._seen[key] = _Seen(zlib.crc32(repr(key).encode()) >> (32 - _MARK_BITS))
        return found

    def tag(self) -> int:
        """A tag for the messages of one exchange of this call."""
        self._drawn = (self._drawn + 1) % _NUMBERS
        return _LOWEST + (self._drawn << _MARK_BITS | self._mark)


def described(key: Key) -> Call:
    """The call of a key, for messages."""
    op, shape, dtype, *details = key
    named: Any = tuple(details)
    sizes: Any = shape
    return Call(str(op), None if sizes is None else tuple(sizes), str(dtype or "").rpartition(".")[2], named)
