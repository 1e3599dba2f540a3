"""Leaving: ends a fit whose process is asked to end. All processes save at the same step, and end.

Whichever process is asked. They agree about once a second (`unidist/keras/consistency/stopping.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from unidist.flight.form import LEFT
from unidist.flight.recorder import recorder
from unidist.keras.consistency.stopping import Looks

_log = logging.getLogger(__name__)
_now = time.monotonic
# By which a scheduler says that a job's time is over.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds within which signals are one request: schedulers tell every process of a job, and launchers tell theirs.
_ONE_REQUEST = 3.0


class Requests:
    """The signals that ask this process to end, noted instead of what they did before.

    SIGUSR1 only where nobody has given it another meaning, as faulthandler does; and none that is ignored.

    Attributes:
        number: of the first that came, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = 0.0
        self._process = os.getpid()
        self._before: dict[int, tuple[Any, Any]] = {}

    def listen(self) -> None:
        """Begins. Nothing where this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            action = _action(number)
            is_wanted = _handler_of(action) != signal.SIG_IGN if number == signal.SIGTERM else not _handler_of(action)
            if is_wanted:
                self._before[number] = signal.signal(number, self._note), action
        recorder.set("saves", int(signal.SIGTERM in self._before))

    def stop(self, deliver: bool = False) -> None:
        """Ends: what was there before is there again. `deliver`: it gets what has come too late."""
        if not self._before:
            return
        if os.getpid() == self._process:
            recorder.set("saves", 0)
        for number, (handler, action) in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler or signal.SIG_DFL)
                # One of C's too, unknown to Python.
                _libc.sigaction(number, action, None)
        self._before = {}
        if deliver and self.number is not None:
            signal.raise_signal(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = _now()
        if self.number is None and os.getpid() == self._process:
            self.number, self._came = number, now
            _log.info("%s: the training saves, and leaves", signal.Signals(number).name)
        elif now - self._came > _ONE_REQUEST or os.getpid() != self._process:
            # A fork of this process, as a worker that reads data, ends as it would have.
            self.stop()
            signal.raise_signal(number)


_libc = ctypes.CDLL(None)


def _action(number: int) -> Any:
    """The system's `struct sigaction`, with room for that of any system. Its first word is the handler."""
    found = ctypes.create_string_buffer(512)
    _libc.sigaction(number, None, found)
    return found


def _handler_of(action: Any) -> int:
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)


class Leaving(Looks):
    """Decides if the processes of a fit are to leave. All come to the same answer at the same step."""

    def __init__(self) -> None:
        self._requests = Requests()
        super().__init__(lambda: self._requests.number is not None, "leaving")

    def begin(self) -> None:
        self._requests.listen()
        super().begin()

    def leave(self) -> NoReturn:
        """Ends this process; all is saved.

        Raises:
            SystemExit: always.
        """
        recorder.set("left", 1)
        raise SystemExit(LEFT)

    def end(self, deliver: bool = False) -> None:
        self._requests.stop(deliver)
