"""Says when a save is due: at each epoch's end, after a number of batches, or by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from unidist.errors import ArgumentError
from unidist.keras.consistency.processes import ALONE, taking_part

Every = str | int | float


class _AtEpochs:
    def has_come(self, steps: int) -> bool:
        return False

    def saved(self) -> None:
        pass


class _BySteps(_AtEpochs):
    def __init__(self, every: int) -> None:
        self._every, self._made = every, 0

    def has_come(self, steps: int) -> bool:
        self._made += steps
        return self._made >= self._every

    def saved(self) -> None:
        self._made = 0


_now = time.monotonic


class _ByTime(_AtEpochs):
    """By the clock of process 0, which sends the others how many steps from now it looks at it again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = self._looked = _now()
        self._steps = self._left = 1

    def has_come(self, steps: int) -> bool:
        self._left -= 1
        if self._left > 0:
            return False
        told = _of_first(self._steps_to_wait())
        self._steps = self._left = max(told, 1)
        return not told

    def _steps_to_wait(self) -> int:
        now = _now()
        each, self._looked = (now - self._looked) / self._steps, now
        remaining = self._seconds - (now - self._began)
        if remaining <= 0:
            return 0
        # Half of the time that is left: steps may get longer.
        return max(1, min(2 * self._steps, int(remaining / max(each, 1e-6) / 2)))

    def saved(self) -> None:
        self._began = _now()


def turn(every: Every) -> Callable[[], _AtEpochs]:
    if every == "epoch":
        return _AtEpochs
    if type(every) is int and every > 0:
        return lambda: _BySteps(every)
    seconds = _seconds(every)
    if not 0 < seconds < math.inf:
        raise ArgumentError(f'every={every!r}: give "epoch", a number of batches (100), or seconds (30.0 or "30s")')
    return lambda: _ByTime(seconds)


def _seconds(every: Every) -> float:
    """0: it is none."""
    if isinstance(every, float):
        return every
    try:
        return float(every.removesuffix("s")) if isinstance(every, str) and every.endswith("s") else 0.0
    except ValueError:
        return 0.0


def _of_first(number: int) -> int:
    """Process 0's number, on every process."""
    return int((taking_part.get() or ALONE).of_first(np.array([number], np.int32), "checkpoints")[0])
