"""Where the threads of a process are that does not answer, outside of Python too."""

from __future__ import annotations

import shutil
import subprocess

# Seconds that a debugger may take: it reads the symbols of a framework's libraries first.
_PATIENCE = 60.0
# Characters of what it prints that are kept.
_KEPT = 20_000


def native_stacks(pid: int) -> str:
    """Returns all threads' stacks of a process, by gdb; "" where there is no gdb, or it may not look."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return ""
    command = [
        gdb,
        "-p",
        str(pid),
        "-batch",
        "-nx",
        "-ex",
        "set print frame-arguments none",
        "-ex",
        "thread apply all bt 14",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    _, found, stacks = done.stdout.partition("\nThread ")
    return (found + stacks)[:_KEPT]
