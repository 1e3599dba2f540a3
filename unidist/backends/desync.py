"""The reports to ranks that disagree: who waits where, for whom and what for."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from unidist.algebra import Axes
from unidist.errors import DesyncError

ADVICE = "all ranks of a group must call the same collectives, on the same shapes and dtypes, in the same order"
# A rank is where the user's code called, not inside of these.
_FRAMEWORKS = {"unidist", "keras", "torch", "jax", "tensorflow", "horovod", "numpy"}
_INSIDE = frozenset({*_FRAMEWORKS, *sys.stdlib_module_names} - {"__main__"})


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, as far as the ranks of its group must agree.

    Attributes:
        op: its name.
        shape: of the local array; None along a dim that may differ between ranks.
        dtype: of the local array, or "" where it has none.
        details: further arguments, as (name, value).
        axes: the mesh axes, where known; not compared.
    """

    op: str
    shape: tuple[int | None, ...] | None = None
    dtype: str = ""
    details: tuple[tuple[str, Hashable], ...] = ()
    axes: Axes = field(default=(), compare=False)

    def __str__(self) -> str:
        text = f"{self.op}({', '.join(f'{name}={value}' for name, value in self.details)})"
        if self.shape is not None:
            sizes = ", ".join("?" if n is None else str(n) for n in self.shape)
            text += f" of {self.dtype} ({sizes}{',' if len(self.shape) == 1 else ''})"
        return f"{text} over {self.axes}" if self.axes else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Says where a rank stands.

    Attributes:
        rank: the rank.
        group: the ranks that it wants to meet.
        tag: the collective.
        purpose: what it is for: a variable's path, "gradient"...
        missing: the ranks of the group that have not come.
        line: the line of the program that called, or "".
        op: the collective's name, where the tag is no Call.
    """

    rank: int
    group: tuple[int, ...]
    tag: Hashable
    purpose: str
    missing: tuple[int, ...]
    line: str
    op: str = ""

    @property
    def collective(self) -> str:
        return self.tag.op if isinstance(self.tag, Call) else self.op or str(self.tag)

    def __str__(self) -> str:
        text = f"{self.tag} in the group of {ranks_text(self.group)}"
        if self.purpose:
            text += f" for {self.purpose!r}"
        return f"{text} at {self.line}" if self.line else text


def deadlock(places: Sequence[Place], ended: Iterable[int] = (), *, kind: str = "") -> DesyncError:
    """Nobody can go on: these ranks wait, those have ended. `kind` is a word before "ranks"."""
    gone = sorted(ended)
    lines = [f"the {kind}ranks are stuck, for none of them can go on:"]
    for text, ranks in _alike(places):
        lines.append(f"  {ranks_text(ranks)} {_s('wait', ranks)} in {text}")
    if gone:
        lines.append(f"  {ranks_text(gone)} ended without it")
    first = places[0]
    concerned = {rank for place in places for rank in (place.rank, *place.missing)}
    return _error([*lines, ADVICE], concerned, first)


def mismatch(here: Place, there: Sequence[Place], *, kind: str = "") -> DesyncError:
    """Returns the error of a rank that came with another call than those that wait there.

    `kind` is a word before "ranks".
    """
    lines = [f"the {kind}ranks {ranks_text(here.group).removeprefix('ranks ')} disagree on a collective:"]
    for text, ranks in _alike((*there, here)):
        lines.append(f"  {ranks_text(ranks)} {_s('call', ranks)} {text}")
    return _error([*lines, ADVICE], {here.rank, *(place.rank for place in there)}, there[0], here)


def _error(lines: list[str], ranks: Iterable[int], *places: Place) -> DesyncError:
    variable = next((place.purpose for place in places if place.purpose), None)
    return DesyncError("\n".join(lines), ranks=tuple(sorted(ranks)), collective=places[0].collective, variable=variable)


def _alike(places: Iterable[Place]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for place in places:
        text = str(place)
        if place.missing:
            text += f", where {ranks_text(place.missing)} {'is' if len(place.missing) == 1 else 'are'} missing"
        found.setdefault(text, []).append(place.rank)
    return list(found.items())


def _s(verb: str, ranks: Sequence[int]) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2, 5-9"."""
    members = list(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(members), lambda pair: pair[1] - pair[0])]
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"rank{'' if len(members) == 1 else 's'} {', '.join(parts)}"


def line_of(thread: int | None) -> str:
    """The innermost line of a thread that is the user's, as "file.py:12 in name"."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in _INSIDE:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
