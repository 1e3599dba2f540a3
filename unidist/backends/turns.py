"""Threads that carry messages do not interrupt those that compute.

gloo's thread waits in epoll for what peers send, and tries the lock of the connection that has something. Where another
thread holds the lock, it goes back to epoll, which answers at once, and so on. With more threads at work than cores,
the thread that holds the lock is often the one that gloo's has just interrupted. That one cannot go on, and the core is
busy with nothing until the scheduler's turn ends: some milliseconds for a message of some bytes.

So these threads get Linux's SCHED_BATCH (sched(7)). One that wakes takes a core that is free, or the next that becomes
so. Where cores are free nothing changes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")


@contextlib.contextmanager
def interrupting_nobody(*names: str) -> Iterator[None]:
    """Lets threads that start inside interrupt no other when they wake.

    `names` are their names; without any, all such threads are meant.

    Only where a process computes in one thread, by OMP_NUM_THREADS=1, as launchers set it. OpenMP's threads wait for
    each other without sleeping, so beside them a message would wait for a turn's end: a step takes half as long again.
    Systems other than Linux, and containers that forbid it, leave the threads as they are: it is about speed alone.
    """
    before = _threads()
    yield
    for thread in _threads() - before:
        with contextlib.suppress(OSError):  # it may have ended
            if not names or (_TASKS / thread / "comm").read_text().strip() in names:
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def _threads() -> frozenset[str]:
    if os.environ.get("OMP_NUM_THREADS") != "1" or not hasattr(os, "SCHED_BATCH"):
        return frozenset()
    try:
        return frozenset(os.listdir(_TASKS))
    except OSError:
        return frozenset()
