"""`unidist doctor --post-mortem DIR`: what each process of a run was at, and who was late for what.

Read from the records that the processes keep (unidist.flight), while they run or after their end, however that came.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidist.backends.desync import ranks_text
from unidist.backends.noting import members_of
from unidist.flight.form import SUFFIX
from unidist.flight.reading import Entry, Flight, FlightError, read
from unidist.flight.recorder import STACKS
from unidist.launch.stalls import awaited, threads_of
from unidist.tables import table

# As argparse ends where it cannot do what it is asked for.
NOTHING_TO_READ = 2
_ATTEMPT = re.compile(r"attempt-(\d+)")
# Seconds without a sign of life that are worth a word.
_SILENT = 2.0
_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Holds what is left of an attempt at a run.

    Attributes:
        attempt: its number, or None where the folder has no attempts.
        flights: the records, by rank.
        stacks: what each rank's threads were at, where they were asked.
        damaged: why a record cannot be read, each.
    """

    attempt: int | None
    flights: Mapping[int, Flight]
    stacks: Mapping[int, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()

    @property
    def without(self) -> tuple[int, ...]:
        """The ranks of the world that have no record."""
        count = max((flight.processes for flight in self.flights.values()), default=0)
        return tuple(rank for rank in range(count) if rank not in self.flights)


@dataclass(frozen=True, slots=True)
class Lateness:
    """The collective that most processes wait in.

    Attributes:
        entry: it, as the one has it that waits longest.
        waiting: the ranks that wait in it.
        seconds: for how long, at most.
        late: its other members that have not come to it.
    """

    entry: Entry
    waiting: tuple[int, ...]
    seconds: float
    late: tuple[int, ...]


def main(where: str, *, as_json: bool) -> int:
    """Prints what is found. Its exit code."""
    found = gather(Path(where))
    if not found.flights:
        told = "; ".join(found.damaged) or f"there is no record (*{SUFFIX})"
        print(f"unidist doctor: {where}: {told}: give the folder that `unidist run --log-dir` had", file=sys.stderr)
        return NOTHING_TO_READ
    print(json.dumps(as_document(found), indent=2) if as_json else as_text(found))
    return 0


def gather(where: Path) -> Remains:
    """The records in a folder and below it, of the last attempt that is there."""
    by_attempt: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(where.rglob(f"*{SUFFIX}")):
        by_attempt[_attempt(path.absolute())].append(path)
    last = max(by_attempt, default=-1)
    flights, stacks, damaged = {}, {}, []
    for path in by_attempt[last]:
        try:
            flight = read(path)
        except (OSError, FlightError) as error:
            damaged.append(str(error))
            continue
        flights[flight.rank] = flight
        beside = path.with_suffix(STACKS)
        if beside.exists() and (text := beside.read_text(errors="replace").strip()):
            stacks[flight.rank] = text
    return Remains(
        attempt=None if last < 0 else last, flights=dict(sorted(flights.items())), stacks=stacks, damaged=tuple(damaged)
    )


def _attempt(path: Path) -> int:
    found = (_ATTEMPT.fullmatch(part) for part in reversed(path.parent.parts))
    return next((int(match.group(1)) for match in found if match), -1)


def lateness(found: Remains) -> Lateness | None:
    """Returns who was late for what; None where nobody waited for others."""
    waits = {rank: entry for rank, flight in found.flights.items() if (entry := awaited(flight)) is not None}
    together: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, entry in waits.items():
        together[entry.what, entry.count if members_of(entry.what) else 0].append(rank)
    if not together:
        return None

    def seconds(rank: int) -> float:
        return _lasted(waits[rank], found.flights[rank])

    ranks = max(together.values(), key=lambda some: (len(some), max(map(seconds, some))))
    longest = max(ranks, key=seconds)
    entry = waits[longest]
    members = members_of(entry.what)
    others = [rank for rank in (*found.flights, *found.without) if rank not in ranks]
    late = [rank for rank in others if _is_late(found.flights.get(rank), rank, entry, members)]
    return Lateness(entry, tuple(ranks), seconds(longest), tuple(sorted(late)))


def _is_late(flight: Flight | None, rank: int, entry: Entry, members: frozenset[int] | None) -> bool:
    if members is None:
        return flight is None or flight.pid != 0
    return rank in members and (flight is None or not flight.has_come_to(entry))


# as text --------------------------------------------------------------------------------------------------------------


def as_text(found: Remains) -> str:
    parts = [_head(found), _table(found), "\n".join(_who(found))]
    for rank, text in found.stacks.items():
        parts.append("\n".join([f"stacks of rank {rank}", *(f"  {line}" for line in threads_of(text))]))
    return "\n\n".join(parts)


def _head(found: Remains) -> str:
    which = "" if found.attempt is None else f"attempt {found.attempt}: "
    lines = [f"{which}records of {ranks_text(found.flights)}"]
    if found.without:
        lines.append(f"{ranks_text(found.without)}: no record: not come so far as to join, or on another node")
    return "\n".join([*lines, *found.damaged])


def _table(found: Remains) -> str:
    head = ("rank", "pid", "phase", "for", "steps", "silent for", "last collective")
    return table([head, *(_row(found, flight) for flight in found.flights.values())], numbers=(0, 1, 3, 4, 5))


def _row(found: Remains, flight: Flight) -> tuple[str, ...]:
    last = _last(flight)
    return (
        str(flight.rank),
        str(flight.pid or "left"),
        flight.phase,
        f"{_in_phase(flight):.1f} s",
        str(flight.resumed + flight.steps),
        f"{_silence(found, flight):.1f} s",
        "none" if last is None else f"{last.what}: {_how(last, flight)}",
    )


def _who(found: Remains) -> Iterator[str]:
    known = lateness(found)
    if known is None:
        yield "no process waited for others"
        return
    entry = known.entry
    what = f"{entry.what}, the {_ordinal(entry.count)}" if members_of(entry.what) else entry.what
    at = f", at {entry.site}" if entry.site else ""
    yield f"{ranks_text(known.waiting)} waited {known.seconds:.1f} s in {what}{at}"
    if not known.late:
        yield "all others of it had come"
    for rank in known.late:
        flight = found.flights.get(rank)
        instead = "it has no record" if flight is None else _instead(flight, entry, _silence(found, flight))
        yield f"rank {rank} had not come to it: {instead}"


def _instead(flight: Flight, entry: Entry, silence: float) -> str:
    said = ["it had left"] if not flight.pid else [f"it was in {flight.phase!r} for {_in_phase(flight):.1f} s"]
    if silence > _SILENT:
        said.append(f"then gave no sign of life for {silence:.1f} s")
    if members_of(entry.what):
        came = max((one.count for one in flight.entries if one.what == entry.what), default=0)
        said.append(f"had come to {came} of them" if came else "none of them is among its last")
    if (last := _last(flight)) is not None:
        said.append(f"and last to {last.what}: {_how(last, flight)}")
    return ", ".join(said)


def _last(flight: Flight) -> Entry | None:
    return awaited(flight) or (flight.entries[-1] if flight.entries else None)


def _lasted(entry: Entry, flight: Flight) -> float:
    return max(0.0, (flight.beat if entry.ended is None else entry.ended) - entry.begun)


def _state(entry: Entry) -> str:
    if entry.ended is None:
        return "waits" if entry.is_waited_in else "under way"
    return "failed" if entry.failed else "ended"


def _how(entry: Entry, flight: Flight) -> str:
    if entry.ended is not None and not entry.failed:
        return f"ended {max(0.0, flight.beat - entry.ended):.1f} s before"
    seconds = f"{_lasted(entry, flight):.1f} s"
    if entry.failed:
        return f"failed after {seconds}"
    return f"waits for {seconds}" if entry.is_waited_in else f"under way for {seconds}"


def _in_phase(flight: Flight) -> float:
    """It may have begun after the last sign of life."""
    return max(0.0, flight.beat - flight.phase_began)


def _silence(found: Remains, flight: Flight) -> float:
    """Behind the last sign of life of all. Clocks of several machines do not compare."""
    return max(one.beat for one in found.flights.values()) - flight.beat


def _ordinal(number: int) -> str:
    return f"{number}{'th' if number % 100 in (11, 12, 13) else _SUFFIXES.get(number % 10, 'th')}"


# as JSON --------------------------------------------------------------------------------------------------------------


def as_document(found: Remains) -> dict[str, Any]:
    """The same for programs."""
    known = lateness(found)
    return {
        "attempt": found.attempt,
        "processes": [_process(found, flight) for flight in found.flights.values()],
        "without_record": list(found.without),
        "damaged": list(found.damaged),
        "awaited": None
        if known is None
        else {
            "what": known.entry.what,
            "count": known.entry.count,
            "site": known.entry.site,
            "waiting": list(known.waiting),
            "seconds": known.seconds,
            "late": list(known.late),
        },
    }


def _process(found: Remains, flight: Flight) -> dict[str, Any]:
    last = _last(flight)
    return {
        "rank": flight.rank,
        "pid": flight.pid,
        "phase": flight.phase,
        "phase_seconds": _in_phase(flight),
        "steps": flight.resumed + flight.steps,
        "committed": flight.committed,
        "silent_seconds": _silence(found, flight),
        "last": None
        if last is None
        else {
            "what": last.what,
            "count": last.count,
            "site": last.site,
            "state": _state(last),
            "seconds": _lasted(last, flight),
        },
        "stacks": threads_of(found.stacks.get(flight.rank, "")),
    }
