"""Leaving: what a fit does whose process is asked to end. All processes save at the same step, and end.

Whichever process is asked. They agree about once a second, by one small number of each: whether it was asked, and from
the first process after how many steps they look next. In one process nothing is exchanged.
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
from unidist.keras.processes import Processes, taking_part

_log = logging.getLogger(__name__)
_now = time.monotonic
# By which a scheduler says that a job's time is over.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds within which signals are one request: schedulers tell every process of a job, and launchers tell theirs.
_ONE_REQUEST = 3.0
# Seconds between two looks: at least, and where a look takes long. At best it takes a 400th of the time.
_BETWEEN, _MOST_BETWEEN, _SHARE = 1.0, 5.0, 400
# What each process sends: the steps until the next look, whether they look when an epoch ends, and whether it is asked.
_MOST_STEPS, _STEP, _EPOCHS, _ASKED = 1 << 28, 4, 2, 1


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


class Leaving:
    """Whether the processes of a fit are to leave. All come to the same answer at the same step."""

    def __init__(self) -> None:
        self._requests = Requests()
        self._cost = 0.0
        self._steps = self._left = 1
        self._looks_at_epochs = self._are_long = True
        self._looked = self._epoch_ended = _now()

    def begin(self) -> None:
        self._requests.listen()
        self._looked = self._epoch_ended = _now()

    def after_step(self) -> bool:
        several = taking_part.get()
        if several is None:
            return self._is_asked
        self._left -= 1
        if self._left > 0:
            return False
        now = _now()
        each = (now - self._looked) / self._steps
        between = min(max(_BETWEEN, _SHARE * self._cost), _MOST_BETWEEN)
        return self._look(several, min(2 * self._steps, _MOST_STEPS, int(between / max(each, 1e-9))))

    def after_epoch(self) -> bool:
        """Looks where epochs take longer than what is between two looks: validation may take long."""
        several, now = taking_part.get(), _now()
        if several is None:
            return self._is_asked
        self._are_long, self._epoch_ended = now - self._epoch_ended > _BETWEEN, now
        return self._looks_at_epochs and self._look(several, self._steps)

    def at_end(self) -> bool:
        """Looks once more, behind all steps."""
        several = taking_part.get()
        return self._is_asked if several is None else self._look(several, 1)

    @property
    def _is_asked(self) -> bool:
        return self._requests.number is not None

    def _look(self, several: Processes, steps: int) -> bool:
        """A collective. The first process says how many steps there are until the next one."""
        began = _now()
        own = max(steps, 1) * _STEP + self._are_long * _EPOCHS + self._is_asked * _ASKED
        told = several.of_all(own, "leaving")
        self._steps = self._left = told[0] // _STEP
        self._looks_at_epochs = bool(told[0] & _EPOCHS)
        self._looked = _now()
        took = self._looked - began
        # The shortest: in the others processes waited for each other.
        self._cost = min(took, self._cost or took)
        return any(number & _ASKED for number in told)

    def leave(self) -> NoReturn:
        """Ends this process; all is saved.

        Raises:
            SystemExit: always.
        """
        recorder.set("left", 1)
        raise SystemExit(LEFT)

    def end(self, deliver: bool = False) -> None:
        self._requests.stop(deliver)
