"""Flight: reads what a record says, also while it is written, and of processes that were killed."""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.errors import UnidistError
from unidist.flight.form import (
    ENTRIES,
    ENTRY,
    ENTRY_FORM,
    FIELDS,
    HEADER,
    MAGIC,
    PHASES,
    RING,
    SIZE,
    SUFFIX,
    TEXTS,
    TIMES,
    WHOLE,
    WORD,
)

_HEADER = struct.Struct(f"<{len(WHOLE)}Q{len(TIMES) + len(PHASES)}d")
_AS_THEY_ARE = ("rank", "processes", "pid", "phase_began", "began", "beat", "steps", "resumed", "kept")
_NOTHING_AT_0 = ("first_step_began", "first_step_ended", "last_step_ended", "committed_at", "timeout")


class FlightError(UnidistError, ValueError):
    """A file that is no record, or a damaged one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that a process began: a collective, a step.

    Attributes:
        number: counts from 1 in its process.
        what: what it is.
        site: where in the program it was called, or "".
        begun, ended: seconds of the machine's monotonic clock; ended is None while it goes on. What was started, and
            waited for later, has begun when the wait began.
        failed: whether it ended by an error.
        count: its number among those that are the same. So it shows who is behind: processes come to the same.
        is_waited_in: whether a thread waited in it, at last; else the process did something else meanwhile.
    """

    number: int
    what: str
    site: str
    begun: float
    ended: float | None
    failed: bool = False
    count: int = 1
    is_waited_in: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Holds what a process was at, when its record was read.

    Attributes:
        rank, processes, pid: which process it is; pid is 0 once it has left its world.
        phase: what its main thread was in; one of PHASES.
        seconds: what it has spent in each phase, without the one under way.
        phase_began, began, beat: seconds of the machine's monotonic clock; beat is the last sign of life.
        first_step_began, first_step_ended, last_step_ended: of the training; None before.
        steps: steps of the training that ended in this process.
        resumed: steps that the training had made where it was resumed.
        kept: of the steps, those before the last checkpoint that counts.
        committed: number of the last checkpoint that counts, or None.
        committed_at: when it came to count.
        saves: whether its training saves and leaves, where it is asked to.
        left: whether it did.
        timeout: seconds that it waits for others, or None where it has joined none.
        entries: the last ones, in their order.
    """

    rank: int
    processes: int
    pid: int
    phase: str
    seconds: dict[str, float]
    phase_began: float
    began: float
    beat: float
    first_step_began: float | None
    first_step_ended: float | None
    last_step_ended: float | None
    steps: int
    resumed: int
    kept: int
    committed: int | None
    committed_at: float | None
    saves: bool
    left: bool
    timeout: float | None
    entries: tuple[Entry, ...]

    @property
    def progress(self) -> int:
        """Steps of the training, before it was resumed too; of a loop of the user's own, its last checkpoint."""
        return self.resumed + self.steps or self.committed or 0

    @property
    def open(self) -> tuple[Entry, ...]:
        """Entries that go on."""
        return tuple(entry for entry in self.entries if entry.ended is None)

    @property
    def wait(self) -> Entry | None:
        """The entry that it waits in, for the longest; else of its last ones one that it waited in in vain."""
        if waits := [entry for entry in self.open if entry.is_waited_in]:
            return min(waits, key=lambda entry: entry.begun)
        last = itertools.takewhile(lambda entry: entry.failed or entry.ended is None, reversed(self.entries))
        # What follows an error fails at once.
        failed = [entry for entry in last if entry.failed]
        return max(failed, key=lambda entry: (entry.ended or 0.0) - entry.begun, default=None)

    def has_come_to(self, other: Entry) -> bool:
        """Returns whether it has begun what another process calls so too."""
        return any(entry.what == other.what and entry.count >= other.count for entry in self.entries)


def read(path: Path) -> Flight:
    """Reads a record.

    Raises:
        FlightError: it is none.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return parse(file.read(SIZE + 1), str(path))


def parse(data: bytes, name: str = "this") -> Flight:
    """Reads what the bytes of a record say. Raises FlightError: they are none."""
    if len(data) != SIZE or int.from_bytes(data[:8], "little") != MAGIC:
        raise FlightError(f"{name} is no record of a process of unidist ({len(data)} bytes, {SIZE} expected)")
    said: dict[str, Any] = dict(zip(FIELDS, _HEADER.unpack_from(data), strict=True))
    if said["phase"] >= len(PHASES):
        raise FlightError(f"{name} is damaged: there is no phase {said['phase']}")
    texts = _texts(data, min(said["kinds"], TEXTS // 4))
    plain = {field: said[field] for field in _AS_THEY_ARE}
    return Flight(
        **plain | {field: said[field] or None for field in _NOTHING_AT_0},
        phase=PHASES[said["phase"]],
        seconds={phase: said[phase] for phase in PHASES},
        committed=said["committed"] - 1 if said["committed"] else None,
        saves=said["saves"] == 1,
        left=said["left"] == 1,
        entries=_entries(data, texts),
    )


def read_all(folder: Path) -> dict[int, Flight]:
    """The records of a folder that can be read, by rank."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            flight = read(path)
        except (OSError, FlightError):
            continue
        found[flight.rank] = flight
    return dict(sorted(found.items()))


def waited(data: bytes, after: int) -> tuple[float, int]:
    """Returns (seconds waited in entries behind this number, which have ended; the last number).

    Of more entries than a record holds, those that it holds stand for all. What is waited for at one time counts once.

    Args:
        data: of a record.
    """
    whole, times = memoryview(data).cast("Q"), memoryview(data).cast("d")
    numbers = whole[RING : RING + ENTRIES * ENTRY : ENTRY].tolist()
    last, places = max(numbers), [RING + k * ENTRY for k, number in enumerate(numbers) if number > after]
    spans = sorted((times[at + 3], abs(times[at + 4])) for at in places if times[at + 3] > 0 and times[at + 4])
    seconds = until = 0.0
    for begun, ended in spans:
        seconds += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return seconds * max(1.0, (last - after) / max(len(places), 1)), last


def order(path: Path, what: int) -> None:
    """Asks the process of a record for something. Raises OSError: there is none."""
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), struct.pack("<Q", what), WORD["order"] * 8)


def _texts(data: bytes, count: int) -> list[str]:
    found, at = [], HEADER
    for _ in range(count):
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if at + length > HEADER + TEXTS:
            break
        found.append(data[at : at + length].decode(errors="replace"))
        at += length
    return found


def _entries(data: bytes, texts: list[str]) -> tuple[Entry, ...]:
    found = []
    ring = struct.iter_unpack(ENTRY_FORM, data[RING * 8 :])
    for place, (number, kind, site, begun, ended, count, _) in enumerate(ring):
        if number and number % ENTRIES == place:
            what, where = (texts[one] if one < len(texts) else "?" for one in (kind, site))
            end = abs(ended) or None
            found.append(Entry(number, what, where, abs(begun), end, ended < 0, count, begun > 0))
    return tuple(sorted(found, key=lambda entry: entry.number))
