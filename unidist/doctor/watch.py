"""Watch: reports what a process is doing, and ends it where that takes too long, whatever it waits in."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before what a process of the world reports; all else that it prints is its framework's.
MARK = "unidist doctor: "
_POLL = 0.05
_LATE = 3


def say(**report: Any) -> None:
    """Reports something to the command.

    Writes to the descriptor itself: sys.stdout may hold back what others printed.
    """
    with open(1, "wb", closefd=False) as stream:
        stream.write(f"{MARK}{json.dumps(report)}\n".encode())


def _where() -> str:
    """Returns where the main thread is.

    A process that waits for others is in a collective, one that they wait for is not.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "at its end"
    return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


class Watch:
    """Ends this process where a step takes longer than its limit.

    A collective that waits in C++ for a process that is gone can be ended in no other way.
    """

    def __init__(self, process: int, linger: float) -> None:
        self._process, self._linger = process, linger
        self._step: tuple[str, float, float] | None = None
        threading.Thread(target=self._look, daemon=True).start()

    @contextmanager
    def step(self, name: str, limit: float) -> Iterator[None]:
        """Reports that a step of at most `limit` seconds begins, and what it raises, which passes on."""
        say(what="begun", process=self._process, step=name)
        self._step = (name, limit, time.monotonic() + limit)
        try:
            yield
        except Exception as error:
            self._step = None
            say(what="error", process=self._process, step=name, kind=type(error).__name__, message=str(error))
            time.sleep(self._linger)
            raise
        self._step = None

    def _look(self) -> None:
        while True:
            time.sleep(_POLL)
            step = self._step
            if step is not None and time.monotonic() > step[2]:
                say(what="late", process=self._process, step=step[0], seconds=step[1], where=_where())
                time.sleep(self._linger)
                sys.stdout.flush()
                os._exit(_LATE)
