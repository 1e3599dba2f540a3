"""Noting: what this process waits in for others is noted in its record (unidist.flight), always.

An adapter looks up the number of a text by a key that is at hand, and makes the text once. The line of the program that
called is costly to find: the recorder finds it where a wait has lasted for half a second, and never before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from unidist.algebra import Axes
from unidist.backends.desync import ranks_text
from unidist.flight.recorder import recorder

# Texts that are kept apart by an adapter: beyond, they are made again.
_KEPT = 4096
_MEMBERS = re.compile(r" of (?:rank|processe?)s? ((?:\d+(?:-\d+)?(?:, )?)+)")


def told(
    op: str,
    ranks: Iterable[int],
    *,
    dtype: str = "",
    shape: Sequence[int | None] | None = None,
    axes: Axes = (),
    purpose: str = "",
    members: str = "rank",
) -> str:
    """A collective as a record names it.

    Example:
        >>> told("all_reduce", range(4), dtype="float32", shape=(16, 8), axes=("data",), purpose="gradient")
        "all_reduce of float32 (16, 8) over ('data',) of ranks 0-3 for 'gradient'"
    """
    sizes = "" if shape is None else str(tuple(shape)).replace("None", "?")
    what = f" of {' '.join(part for part in (dtype, sizes) if part)}" if dtype or sizes else ""
    over = f" over {axes}" if axes else ""
    who = ranks_text(ranks)
    if members == "process":
        who = who.replace("ranks ", "processes ").replace("rank ", "process ")
    return f"{op}{what}{over} of {who}{f' for {purpose!r}' if purpose else ''}"


def members_of(text: str) -> frozenset[int] | None:
    """The processes that take part, of a text by `told`; None where it does not say.

    Example:
        >>> sorted(members_of("barrier of ranks 0-2, 5") or ())
        [0, 1, 2, 5]
    """
    found = _MEMBERS.search(text)
    if found is None:
        return None
    runs = [part.partition("-") for part in found.group(1).rstrip(", ").split(", ")]
    return frozenset(rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1))


class Kinds:
    """The numbers of an adapter's texts, by key."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __call__(self, key: Hashable, make: Callable[[], str]) -> int:
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[key] = recorder.kind(make())
        return found


class Noted:
    """Inside, this thread waits for others; by an exception it ends as failed.

    Args:
        kind: of the recorder's.
    """

    __slots__ = ("_kind", "_number")

    def __init__(self, kind: int) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._number = recorder.begin(self._kind)

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> None:
        recorder.end(self._number, error is not None)


def noted(text: str) -> Noted:
    """As Noted, of what is seldom waited in."""
    return Noted(recorder.kind(text))
