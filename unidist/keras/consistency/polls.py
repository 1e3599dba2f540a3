"""Looks: whether any of several processes asks for something, which all learn at the same step.

They exchange one small number about once a second: whether this process asks, and from the first one after how many
steps they look next. In one process nothing is exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unidist.keras.consistency.processes import Processes, taking_part

_now = time.monotonic
# Seconds between two looks: at least, and where a look takes long. At best it takes a 400th of the time.
_BETWEEN, _MOST_BETWEEN, _SHARE = 1.0, 5.0, 400
# What each process sends: the steps until the next look, whether they look when an epoch ends, and whether it asks.
_MOST_STEPS, _STEP, _EPOCHS, _ASKED = 1 << 28, 4, 2, 1


class Looks:
    """The looks of a fit.

    Args:
        asks: whether this process asks.
        purpose: what for.
    """

    def __init__(self, asks: Callable[[], bool], purpose: str) -> None:
        self._asks, self._purpose = asks, purpose
        self._cost = 0.0
        self._steps = self._left = 1
        self._looks_at_epochs = self._are_long = True
        self._looked = self._epoch_ended = _now()

    def begin(self) -> None:
        self._looked = self._epoch_ended = _now()

    def after_step(self) -> bool:
        several = taking_part.get()
        if several is None:
            return self._asks()
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
            return self._asks()
        self._are_long, self._epoch_ended = now - self._epoch_ended > _BETWEEN, now
        return self._looks_at_epochs and self._look(several, self._steps)

    def now(self) -> bool:
        """Looks once more, where all processes do."""
        several = taking_part.get()
        return self._asks() if several is None else self._look(several, self._steps)

    def _look(self, several: Processes, steps: int) -> bool:
        """A collective. The first process says how many steps there are until the next one."""
        began = _now()
        own = max(steps, 1) * _STEP + self._are_long * _EPOCHS + self._asks() * _ASKED
        told = several.of_all(own, self._purpose)
        self._steps = self._left = told[0] // _STEP
        self._looks_at_epochs = bool(told[0] & _EPOCHS)
        self._looked = _now()
        took = self._looked - began
        # The shortest: in the others processes waited for each other.
        self._cost = min(took, self._cost or took)
        return any(number & _ASKED for number in told)
