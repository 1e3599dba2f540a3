"""Stopping: whichever process sets `model.stop_training`, all end their fit behind the same step.

A callback may decide by a clock, and a signal reaches one process. So a process's wish is taken back until all know it.
They agree behind each step or epoch where a callback may stop there, by its code: then the training ends at the step
where one device's would. Elsewhere (handlers of signals, threads) they agree about once a second.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType
from typing import Any

from unidist.keras.consistency.polls import Looks
from unidist.keras.consistency.processes import taking_part
from unidist.keras.layer_facts import is_of_keras
from unidist.keras.patching.compat import Callback

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
