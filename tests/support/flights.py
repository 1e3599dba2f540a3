"""What this process has noted in its record, and made-up records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unidist.flight.reading import Entry, Flight, parse
from unidist.flight.recorder import Recorder, recorder


def here() -> Flight:
    """This process's record, as it is now."""
    return parse(bytes(recorder))


def since(call: Callable[[], Any], containing: str = "") -> list[Entry]:
    """The entries that a call makes, in their order."""
    before = max((entry.number for entry in here().entries), default=0)
    call()
    return [entry for entry in here().entries if entry.number > before and containing in entry.what]


def said(entries: list[Entry]) -> list[tuple[str, int, str]]:
    """(what, which of its kind, how it stands) of each."""
    return [(entry.what, entry.count, how(entry)) for entry in entries]


def how(entry: Entry) -> str:
    if entry.ended is None:
        return "waits" if entry.is_waited_in else "under way"
    return "failed" if entry.failed else "ended"


def flight(rank: int, **fields: Any) -> Flight:
    """A record as this process might have it, but for some fields."""
    return replace(parse(bytes(Recorder())), **{"rank": rank, "timeout": None, "processes": 4} | fields)
