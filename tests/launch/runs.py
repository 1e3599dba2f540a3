"""`unidist run` as a person starts it, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.hiding import path_with

ROOT = Path(__file__).parents[2]
LIMIT = 200.0


@dataclass(frozen=True)
class Done:
    """A run that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    def of_rank(self, rank: int) -> list[str]:
        """What a rank printed, its prefix taken off."""
        prefix = f"[{rank}] "
        return [line.removeprefix(prefix) for line in self.out.splitlines() if line.startswith(prefix)]


def environment() -> dict[str, str]:
    """Ours, with this checkout's package wherever the run starts, as an installed one would be found."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Starts `unidist run`, in a group of its own as a shell does, without the folder on the path.

    Keras finds what it would import for nothing as little as in the tests' other programs (tests/support/hiding.py).
    """
    hiding = path_with("tensorflow") if "tensorflow" in arguments else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (hiding, str(ROOT))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "unidist", "run", *arguments],
        cwd=folder,
        env={**environment(), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit: float = LIMIT) -> Done:
    """Waits for it. One that takes longer than `limit` seconds is asked to end, and fails the test."""
    begun = time.monotonic()
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=30)
        raise AssertionError(f"not done after {limit} s\n{out}\n{err}") from None
    return Done(process.returncode, out, err, time.monotonic() - begun)


def run(arguments: Sequence[str], folder: Path) -> Done:
    return finish(start(arguments, folder))


def pids(folder: Path) -> list[int]:
    """The ids that the processes of a run have left in files called *.pid."""
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid")) if path.read_text()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition: Callable[[], bool], what: str, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit} s"
        time.sleep(0.05)


def only_prefixed(text: str) -> bool:
    return all(re.match(r"\[\d+\] ", line) for line in text.splitlines())
