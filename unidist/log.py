"""Logs what unidist decides through Python's logging, as "unidist". Nobody hears it until asked.

What makes the user wait says so by itself, on standard error: `while_long`.

UNIDIST_LOG=info (or debug, warning) writes it to standard error: of the first process alone, or with
UNIDIST_LOG_RANKS=all of every process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from unidist.errors import CapabilityError

VARIABLE, RANKS = "UNIDIST_LOG", "UNIDIST_LOG_RANKS"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}

# Seconds that pass without a word.
PATIENCE = 3.0

_top = logging.getLogger("unidist")
# A library's warnings would go to standard error otherwise.
_top.addHandler(logging.NullHandler())
_lines: _Lines | None = None
# As `start` was given it last.
_place: Callable[[], int | None] | None = None
_going_on: set[str] = set()
_lock = threading.Lock()


class _Lines(logging.Handler):
    """Lines on what is standard error when they are written.

    Args:
        level: what is below it is not written.
        place: this process's number in the world, None where no world is joined.
        everywhere: whether processes behind the first write too.
    """

    def __init__(self, level: int, place: Callable[[], int | None], everywhere: bool) -> None:
        super().__init__(level)
        self._place, self._everywhere = place, everywhere
        # A process that has left its world still has the number that it had there.
        self._known = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = self._place()
        self._known = self._known if now is None else now
        if not self._everywhere and self._known:
            return
        try:
            print(f"unidist {self._known} {record.levelname}: {record.getMessage()}", file=sys.stderr, flush=True)
        except Exception:
            # As Python's own handlers: what is logged must not end what it is about.
            self.handleError(record)


def start(place: Callable[[], int | None]) -> None:
    """Writes the log as the environment says from here on, and no longer as it said before.

    Args:
        place: this process's number in the world, None where no world is joined. Asked at each line, since a world
            may be joined later.

    Raises:
        CapabilityError: UNIDIST_LOG or UNIDIST_LOG_RANKS has a value that is none.
    """
    global _lines, _place
    _place = place
    level, ranks = _said(VARIABLE, [*LEVELS]), _said(RANKS, ["first", "all"])
    if _lines is not None:
        _top.removeHandler(_lines)
        _top.setLevel(logging.NOTSET)
        _lines = None
    if level:
        _lines = _Lines(LEVELS[level], place, ranks == "all")
        _top.addHandler(_lines)
        _top.setLevel(LEVELS[level])


@contextlib.contextmanager
def while_long(what: str) -> Iterator[None]:
    """Says what takes more than three seconds while it goes on, and at its end how long it took.

    The first process says it, on standard error. Virtual ranks that do the same at once say it once.
    """
    with _lock:
        is_said = what in _going_on
        _going_on.add(what)
    if is_said:
        yield
        return
    began = time.monotonic()
    timer = threading.Timer(PATIENCE, _say, (f"{what}...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # What it says comes before what is said here.
        timer.join()
        _going_on.discard(what)
        if (seconds := time.monotonic() - began) > PATIENCE:
            _say(f"{what} took {seconds:.0f} s")


def _say(text: str) -> None:
    if sys.stderr is not None and (_place is None or not _place()):
        # One that is closed does not end what it is about.
        with contextlib.suppress(OSError, ValueError):
            print(f"unidist: {text}", file=sys.stderr, flush=True)


def _said(variable: str, allowed: list[str]) -> str:
    found = os.environ.get(variable, "").lower()
    if found and found not in allowed:
        *first, last = map(repr, allowed)
        raise CapabilityError(f"{variable} must be {', '.join(first)} or {last}, found {os.environ[variable]!r}")
    return found
