"""Called in a process of a world: which of its threads interrupt no other when they wake."""

from __future__ import annotations

import os
from pathlib import Path


def threads() -> list[tuple[str, bool]]:
    """By name, whether each is of SCHED_BATCH; the first is the program's own."""
    found = sorted(int(number) for number in os.listdir("/proc/self/task"))
    return [(_name(thread), os.sched_getscheduler(thread) == os.SCHED_BATCH) for thread in found]


def _name(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
