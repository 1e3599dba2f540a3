"""What layers with cut weights do, in words."""

from __future__ import annotations

from collections.abc import Iterable

_NAMES = 3


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, each once; of many the first ones.

    Example:
        >>> listed("a"), listed("aab"), listed("abcdefg")
        ('a', 'a and b', 'a, b, c and 4 more')
    """
    found = list(dict.fromkeys(names))
    *first, last = found if len(found) <= _NAMES + 1 else [*found[:_NAMES], f"{len(found) - _NAMES} more"]
    return f"{', '.join(first)} and {last}" if first else last
