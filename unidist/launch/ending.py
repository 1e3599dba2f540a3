"""Ending processes: all of them, with their children, politely and then not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MARK = "UNIDIST_RUN"
_PROC = Path("/proc")
_AFTER_KILL = 10.0


def mark(environ: dict[str, str], run_id: str) -> None:
    """Marks an environment, which every descendant inherits, as a run's (and of those around it)."""
    outer = environ.get(MARK)
    environ[MARK] = f"{outer},{run_id}" if outer else run_id


def marked(run_id: str) -> list[int]:
    """Returns the living processes of a run, in other sessions too. Empty where there is no /proc."""
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()] if _PROC.is_dir() else []
    return [pid for pid in pids if _carries(pid, run_id)]


def _carries(pid: int, run_id: str) -> bool:
    prefix = f"{MARK}=".encode()
    return any(v.startswith(prefix) and run_id.encode() in v[len(prefix) :].split(b",") for v in _variables(pid))


def _variables(pid: int) -> list[bytes]:
    """Returns the environment of a process; nothing where it has ended meanwhile, or is another user's."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def end(
    run_id: str,
    groups: Iterable[int],
    running: Callable[[], bool],
    grace: float,
    hurry: Callable[[], bool],
    deaf: Callable[[], Iterable[int]] = tuple,
) -> None:
    """Ends every process of a run: SIGTERM, after `grace` seconds SIGKILL. Returns when none is left.

    What is stopped (SIGSTOP) is woken, so that it hears of it.

    Args:
        run_id: what their environments are marked with.
        groups: process groups that the launcher made; where the system has no /proc only these are reached.
        running: whether a process that the launcher started itself still runs; reaps those that ended.
        grace: seconds between the two signals.
        hurry: whether to kill now.
        deaf: processes that hear of no signal, and are killed now.
    """
    groups = tuple(groups)
    _send(run_id, groups, signal.SIGTERM)
    # One that is stopped hears of it when it goes on.
    _send(run_id, groups, signal.SIGCONT)
    deadline = time.monotonic() + grace
    killed = False
    while running() or marked(run_id):
        late = time.monotonic() > deadline
        if killed and late:
            return
        if not killed and (late or hurry()):
            killed, deadline = True, time.monotonic() + _AFTER_KILL
        if killed:
            _send(run_id, groups, signal.SIGKILL)
        for pid in deaf():
            # Its number may be another's by now.
            if not _PROC.is_dir() or _carries(pid, run_id):
                send(pid, signal.SIGKILL)
        time.sleep(0.02)


def kill_rest(pid: int, lifeline: str) -> None:
    """Kills all other processes of the innermost run that process `pid`, this one, belongs to.

    Those that were started with the variable `lifeline`, and do the same, come last: two that killed each other first
    would leave the others alive.
    """
    if run_id := os.environ.get(MARK, "").rpartition(",")[2]:
        given = f"{lifeline}=".encode()
        for other in sorted(marked(run_id), key=lambda other: any(v.startswith(given) for v in _variables(other))):
            if other != pid:
                send(other, signal.SIGKILL)


def _send(run_id: str, groups: Iterable[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    for pid in marked(run_id):
        send(pid, number)


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process, unless that has ended or is another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
