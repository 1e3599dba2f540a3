"""A fit that a callback follows: from its beginning, through the steps of its epochs, to its end.

Keras tells callbacks of steps by their logs, and waits for these on JAX and TensorFlow where one callback asks. Who
follows is called without logs, and after all other callbacks: so what they have counted is of the same moment.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from unidist.keras import compat
from unidist.keras.compat import Callback, CallbackList, EpochIterator, tree
from unidist.keras.interception import Hook


class Follower(Callback):  # type: ignore[misc]
    """A callback that follows the fit which it is given to. All methods are called in the thread of fit."""

    def fit_begins(self, model: Any, epochs: int) -> None:
        """Before the data is made ready."""

    def data_is_ready(self, iterator: Any) -> None:
        """Keras's EpochIterator of the training data is made."""

    def training_begins(self, callbacks: Any, others: Callable[[], None]) -> None:
        """The model is built. `others` tells the callbacks so."""
        others()

    def epoch_ended(self, epoch: int, callbacks: Any) -> None:
        """The callbacks know it."""

    def fit_ended(self) -> None:
        """It ended, or raised."""


_TRAINERS = {"torch": "TorchTrainer", "jax": "JAXTrainer", "tensorflow": "TensorFlowTrainer"}

_current: ContextVar[Follower | None] = ContextVar("unidist_follower", default=None)


def hooks() -> Iterator[Hook]:
    """Where no callback follows all is as before."""
    found = trainer()
    if found is None:
        return
    why = "a training goes on where it stood"
    # Under the drivers' own hooks of it: all processes are there, with one random state.
    yield Hook(found, "fit", _fitting, why)
    yield Hook(EpochIterator, "__init__", _reading, why)
    yield Hook(CallbackList, "on_train_begin", _beginning, why)
    yield Hook(CallbackList, "on_epoch_end", _ending, why)


def trainer() -> Any:
    """Keras's class. Its import imports its framework: only that of the Keras backend."""
    name = _TRAINERS.get(keras.config.backend())
    return None if name is None else getattr(compat, name)


def _follower_in(callbacks: Any) -> Follower | None:
    given = callbacks.callbacks if isinstance(callbacks, CallbackList) else tree.flatten(callbacks)
    found = [one for one in given if isinstance(one, Follower)]
    if len(found) > 1:
        raise ValueError(f"fit was given {len(found)} callbacks of {type(found[0]).__name__}: one can go on")
    return found[0] if found else None


@contextlib.contextmanager
def _followed_by(follower: Follower | None, model: Any, epochs: int) -> Iterator[None]:
    token = _current.set(follower)
    try:
        if follower is not None:
            follower.fit_begins(model, epochs)
        yield
    finally:
        if follower is not None:
            follower.fit_ended()
        _current.reset(token)


def _fitting(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        with _followed_by(_follower_in(given.arguments["callbacks"]), self, given.arguments["epochs"]):
            return original(self, *args, **kwargs)

    return fit


def _reading(original: Any) -> Any:
    """The first iterator that a fit makes is that of its training data."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (Python's name)
        original(self, *args, **kwargs)
        if (follower := _current.get()) is not None:
            follower.data_is_ready(self)

    return __init__


def _beginning(original: Any) -> Any:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        follower = _current.get()
        if follower is not None and follower in self.callbacks:
            follower.training_begins(self, lambda: original(self, logs))
        else:
            original(self, logs)

    return on_train_begin


def _ending(original: Any) -> Any:
    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        original(self, epoch, logs)
        follower = _current.get()
        if follower is not None and follower in self.callbacks:
            follower.epoch_ended(epoch, self)

    return on_epoch_end
