"""Starts a world of real processes, which tries each of its links and reports what it found."""

from __future__ import annotations

import io
import time

from unidist import launch
from unidist.doctor import judging, matrix
from unidist.doctor.backends import count_cards
from unidist.doctor.check import Check
from unidist.doctor.links import Task
from unidist.doctor.matrix import Link
from unidist.doctor.reports import Reports, read
from unidist.launch import LaunchError, Request

# What the processes run; the arguments follow.
WORKER = ("-m", "unidist.doctor.worker")
_WORDS = 15
_LAUNCHER = "unidist: "
_IMPORTING, _JOINING = 180.0, 60.0
_MARGIN = 15.0


def request(
    backend: str,
    processes: int,
    *,
    nodes: int = 1,
    node_rank: int = 0,
    address: str | None = None,
    devices_per_process: int | None = None,
    timeout: float = 60.0,
) -> Request:
    """The launch of a world that tries its links. Raises LaunchError: values that do not fit each other."""
    if timeout <= 0:
        raise LaunchError(f"timeout must be more than 0 seconds, got {timeout:g}")
    task = Task(
        backend=backend,
        processes=processes,
        timeout=timeout,
        importing=max(timeout, _IMPORTING),
        joining=max(timeout, _JOINING),
    )
    return Request(
        backend=backend,
        command=(*WORKER, task.write()),
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        address=address,
        devices_per_process=devices_per_process,
    )


def run(asked: Request) -> Reports:
    """Starts the world and waits for its end.

    Every step of its processes has a limit. Where none of them has reported anything for longer than the longest, they
    are ended from here.

    Raises:
        BackendNotAvailableError, CapabilityError, LaunchError: it cannot be started (launch.run).
    """
    out, err = _Heard(Task.read(asked.command[-1])), io.StringIO()
    code = launch.run(asked, out=out, err=err, give_up=out.silent_for_too_long)
    lines = err.getvalue().splitlines()
    own = next((line for line in lines if line.startswith(_LAUNCHER)), "").removeprefix(_LAUNCHER)
    return Reports(request=asked, told=read(out.getvalue()), code=code, words=lines[-_WORDS:], launcher=own)


class _Heard(io.StringIO):
    """Keeps what the processes print, and when the last of it came."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._begun = self._last = time.monotonic()
        self._starting = task.joining + _MARGIN
        self._longest = max(task.importing, task.joining, task.timeout) + task.linger + _MARGIN

    def write(self, text: str) -> int:
        self._last = time.monotonic()
        return super().write(text)

    def silent_for_too_long(self) -> str | None:
        allowed = self._starting if self._last == self._begun else self._longest
        if time.monotonic() - self._last <= allowed:
            return None
        return f"no process said anything for {allowed:g} s"


def judge(reports: Reports) -> tuple[list[Check], tuple[Link, ...]]:
    """The checks of a world that has ended, and its links."""
    links = matrix.links(reports)
    checks = [judging.processes(reports), *judging.same_versions(reports), judging.joining(reports)]
    checks += [
        judging.devices(reports, count_cards()),
        judging.clocks(reports),
        *matrix.check(reports, links),
        *judging.whole_world(reports),
    ]
    return [*checks, *judging.ending(reports, checks)], links
