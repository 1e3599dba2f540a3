"""Stopping: whichever process sets `model.stop_training`, all end their fit behind the same step.

A callback may decide by a clock, and a signal reaches one process. So a process's wish is taken back until all know it.
They agree behind each step or epoch where a callback may stop there, by its code: then the training ends at the step
where one device's would. Elsewhere (handlers of signals, threads) they agree about once a second.

There, and where a fit saves and leaves, they exchange one small number: whether this process asks, and from the first
one after how many steps they look next. In one process nothing is exchanged.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from unidist.keras.consistency.processes import Processes, taking_part
from unidist.keras.layer_facts import is_of_keras
from unidist.keras.patching.compat import Callback

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


_WISH, _AGREEING = "stop_training", "agreement"
_OF_STEPS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_AT_STEPS, _AT_EPOCHS = 1, 2


class Stopping:
    """The wishes to stop of one fit in several processes.

    Args:
        model: its.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._wishes = False
        self._places = 0
        self._looks = Looks(lambda: self._wishes, _AGREEING)

    def begin(self, callbacks: Iterable[Any]) -> None:
        """A collective: a process may have callbacks of its own, as a logger in the first one."""
        if (several := taking_part.get()) is not None:
            own = _places(self._model, callbacks)
            for found in several.of_all(own, _AGREEING):
                self._places |= found
            self._looks.begin()

    def after_step(self) -> None:
        self._agree(Looks.now if self._places & _AT_STEPS else Looks.after_step)

    def after_epoch(self) -> None:
        self._agree(Looks.now if self._places else Looks.after_epoch)

    def end(self) -> None:
        """Makes what a process has wished too late known to all, as to code behind the fit."""
        if not self._places:
            self._agree(Looks.now)

    def _agree(self, look: Any) -> None:
        if taking_part.get() is not None:
            self._wishes |= bool(self._model.stop_training)
            self._model.stop_training = look(self._looks)


def _places(model: Any, callbacks: Iterable[Any]) -> int:
    """Returns where a callback, or a step of the user's own, may wish to stop."""
    places = 0
    for one in (each for each in callbacks if _may_wish(type(each).__mro__, vars(each).values())):
        # Some callbacks are given their hooks as attributes.
        is_of_steps = any(h in vars(one) or getattr(type(one), h) is not getattr(Callback, h) for h in _OF_STEPS)
        places |= _AT_STEPS | _AT_EPOCHS if is_of_steps else _AT_EPOCHS
    own = [kind for kind in type(model).__mro__ if not is_of_keras(kind)]
    return places | (_AT_STEPS | _AT_EPOCHS if _may_wish(own, ()) else 0)


def _may_wish(kinds: Iterable[type], more: Iterable[Any]) -> bool:
    """Returns whether the code of classes, or of functions among some values, names the attribute."""
    values = [value for kind in kinds for value in vars(kind).values()] + list(more)
    return any(_names(inspect.unwrap(value).__code__) for value in values if inspect.isfunction(value))


def _names(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return _WISH in code.co_names or _WISH in code.co_consts or any(map(_names, inner))
