"""Stalls: finds the process that is alive and does not go on, in the records that processes keep.

The records are those of unidist.flight.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from unidist.backends.desync import ranks_text
from unidist.backends.noting import members_of
from unidist.flight.form import SUFFIX, file_of
from unidist.flight.reading import Entry, Flight
from unidist.flight.recorder import STACKS
from unidist.launch.ending import send

# Ranks give up by themselves after their timeout, and that shall be seen as what it is.
_EARLY = 0.1
# Seconds that a wait for a process that has ended may still last: what it sent last may be on its way.
_ON_ITS_WAY = 3.0
# Seconds until a process that is asked for its stacks has written them, and lines of them that are shown.
_STACKS_ARRIVE, _SHOWN = 1.0, 60
_PACKAGE, _PYTHON = Path(__file__).parents[1], Path(os.__file__).parent
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_STATES = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a device or a file system",
}


@dataclass(frozen=True, slots=True)
class Stall:
    """Processes that do not go on.

    Attributes:
        ranks: those processes.
        why: as "gave no sign of life for 30 s".
        is_silent: they run and give no sign of life, as what waits in C, with Python's lock held, for what has ended.
    """

    ranks: tuple[int, ...]
    why: str
    is_silent: bool = False

    def __str__(self) -> str:
        return f"{ranks_text(self.ranks)} {self.why}"


def find(
    flights: Mapping[int, Flight],
    ranks: Iterable[int],
    timeout: float,
    now: float,
    done: Mapping[int, float] | None = None,
) -> Stall | None:
    """Returns who holds up the others, once that has lasted for the timeout; at once, where it has ended.

    Args:
        flights: the records of this node's processes, so far as they have one.
        ranks: this node's.
        timeout: seconds, where a record does not say how long its process waits.
        now: the monotonic clock's time.
        done: when each rank that has ended with exit code 0 was seen to have.
    """

    def enough(flight: Flight) -> float:
        return (flight.timeout or timeout) - _EARLY

    silent = [flight for flight in flights.values() if now - flight.beat > enough(flight)]
    if silent := [flight for flight in silent if _is_alive(flight)]:
        # What waits for a stopped one in C, with Python's lock held, is silent too.
        silent = [flight for flight in silent if state_of(flight.pid) in _STOPPED] or silent
        runs = state_of(silent[0].pid) not in _STOPPED
        return Stall(tuple(flight.rank for flight in silent), _silence(silent[0], now), is_silent=runs)
    waiting = {rank: entry for rank, flight in flights.items() if (entry := awaited(flight)) is not None}
    if (stall := _without(done or {}, waiting, flights, now)) is not None:
        return stall
    in_vain = {
        rank: entry for rank, entry in waiting.items() if (entry.ended or now) - entry.begun > enough(flights[rank])
    }
    idle = late(flights, ranks)
    # The one that has waited longest waits for those; others may wait for it.
    for entry in sorted(in_vain.values(), key=lambda one: one.begun):
        members = members_of(entry.what)
        absent = tuple(rank for rank in idle if _is_missing(rank, flights.get(rank), entry, members))
        if absent:
            kept = ranks_text(rank for rank in waiting if members is None or rank in members)
            said = f"for which {kept}" if members else f"holds up {kept}, which"
            what = f"did not come to {entry.what}, {said}" if members else said
            where = ("" if members else f" in {entry.what}") + (f" at {entry.site}" if entry.site else "")
            waited = f"waited {(entry.ended or now) - entry.begun:.0f} s{where}"
            return Stall(absent, f"{what} {waited}{_states(absent, flights)}")
    return None


def awaited(flight: Flight) -> Entry | None:
    """Returns what a process waits in, or has waited in in vain last of all.

    One that reads a value waits for the step that it has started last before.
    """
    wait = flight.wait
    if wait is None or members_of(wait.what) is not None:
        return wait
    for entry in reversed(flight.entries):
        goes_on = entry.ended is None or entry.failed
        if entry.number < wait.number and goes_on and members_of(entry.what) is not None:
            return replace(entry, begun=wait.begun, ended=wait.ended, site=wait.site, is_waited_in=True)
    return wait


def _states(ranks: Iterable[int], flights: Mapping[int, Flight]) -> str:
    states = {rank: _STATES.get(state_of(flights[rank].pid)) for rank in ranks if rank in flights}
    return "".join(f"; rank {rank} {state}" for rank, state in states.items() if state)


def _is_missing(rank: int, flight: Flight | None, entry: Entry, members: frozenset[int] | None) -> bool:
    """Returns whether a process that waits for nobody has not come."""
    return members is None or (rank in members and (flight is None or not flight.has_come_to(entry)))


def _without(
    done: Mapping[int, float], waiting: Mapping[int, Entry], flights: Mapping[int, Flight], now: float
) -> Stall | None:
    """Processes that have ended well and that others wait for."""
    for rank, entry in waiting.items():
        left = {one: at for one, at in done.items() if _never_comes(flights.get(one), one, flights[rank], entry)}
        if left and entry.ended is None and now - max(*left.values(), entry.begun) > _ON_ITS_WAY:
            return Stall(tuple(left), f"did not come to {entry.what}, for which rank {rank} waits")
    return None


def _never_comes(gone: Flight | None, rank: int, flight: Flight, entry: Entry) -> bool:
    """Returns whether a process that has ended is one for which this one waits."""
    if (members := members_of(entry.what)) is None:
        return gone is None and flight.phase == "joining"
    return _is_missing(rank, gone, entry, members)


def late(flights: Mapping[int, Flight], ranks: Iterable[int]) -> tuple[int, ...]:
    """Returns the ranks that run and wait for nobody.

    One without a record has not come so far as to have one.
    """
    return tuple(rank for rank in ranks if (one := flights.get(rank)) is None or (one.wait is None and _is_alive(one)))


def state_of(pid: int) -> str:
    """Returns psutil's word for the state of a process, as "stopped". "": no process."""
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).status()) if pid else ""
    return ""


def records(folder: Path) -> dict[Path, bytes]:
    """The records of a folder as they are now, byte by byte."""
    return {path: path.read_bytes() for path in folder.glob(f"*{SUFFIX}")}


def stacks(folder: Path, flights: Mapping[int, Flight], ranks: Iterable[int]) -> list[str]:
    """Returns where these processes stand, as lines: they are asked, and woken where they are stopped."""
    known = [flights[rank] for rank in ranks if rank in flights]
    files = {flight.rank: file_of(folder, flight.rank, STACKS) for flight in known}
    for flight in known:
        if flight.pid and files[flight.rank].exists():
            for number in (signal.SIGUSR2, signal.SIGCONT):
                send(flight.pid, number)
    deadline = time.monotonic() + _STACKS_ARRIVE
    lines: list[str] = []
    for rank, path in files.items():
        while path.exists() and not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.02)
        text = path.read_text(errors="replace") if path.exists() else ""
        lines += [f"[{rank}] {line}" for line in threads_of(text)[:_SHOWN]]
    return lines


def threads_of(text: str) -> list[str]:
    """Returns faulthandler's stacks, the main thread's first. The package's own threads are left out."""
    threads = [part.splitlines() for part in reversed(text.strip().split("\n\n"))]
    return [line for lines in threads if not all(_is_ours(line) for line in lines[1:]) for line in lines]


def _is_ours(line: str) -> bool:
    path = Path(line.partition('"')[2].partition('"')[0])
    is_pythons = path.is_relative_to(_PYTHON) and not {"site-packages", "dist-packages"} & set(path.parts)
    return is_pythons or path.is_relative_to(_PACKAGE)


def _silence(flight: Flight, now: float) -> str:
    how = _STATES.get(state_of(flight.pid), "runs, and none of its threads does")
    return f"gave no sign of life for {now - flight.beat:.0f} s: it {how}"


def _is_alive(flight: Flight) -> bool:
    return state_of(flight.pid) not in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
