"""A fit that a callback follows: from its beginning, through the steps of its epochs, to its end.

Keras informs callbacks of steps by their logs, and waits for these on JAX and TensorFlow where one callback asks. Who
follows is called without logs, and after all other callbacks: so what they have counted is of the same moment.

What of a training the main thread is in is noted in this process's record (unidist.flight).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from unidist.errors import ArgumentError
from unidist.flight.recorder import recorder
from unidist.keras.consistency.processes import taking_part
from unidist.keras.consistency.stopping import Stopping
from unidist.keras.patching import compat
from unidist.keras.patching.compat import Callback, CallbackList, EpochIterator, tree
from unidist.keras.patching.patches import Hook, calling


class Follower(Callback):  # type: ignore[misc]
    """A callback that follows the fit which it is given to. All methods are called in the thread of fit."""

    # Where several follow a fit, those of lower places are called first.
    place = 0

    @property
    def steps_before(self) -> int:
        """Steps that the training had made before this fit."""
        return 0

    def fit_begins(self, model: Any, epochs: int) -> None:
        """Before the data is made ready."""

    def data_is_ready(self, iterator: Any) -> None:
        """Keras's EpochIterator of the training data is made."""

    def training_begins(self, callbacks: Any, others: Callable[[], None]) -> None:
        """The model is built. `others` informs the callbacks."""
        others()

    def step_begins(self) -> None:
        """The callbacks know it."""

    def step_ended(self, logs: Any) -> None:
        """The callbacks know it.

        Args:
            logs: those that Keras has given them; None where nobody has asked for logs.
        """

    def epoch_ended(self, epoch: int, callbacks: Any) -> None:
        """The callbacks know it."""

    def fit_ended(self) -> None:
        """It ended, or raised."""


_TRAINERS = {"torch": "TorchTrainer", "jax": "JAXTrainer", "tensorflow": "TensorFlowTrainer"}

_current: ContextVar[tuple[Follower, ...]] = ContextVar("unidist_followers", default=())
# The callbacks of the fit that is under way, once it has begun, and the wishes to stop it.
_stopping: ContextVar[tuple[Any, Stopping] | None] = ContextVar("unidist_stopping", default=None)


def hooks() -> Iterator[Hook]:
    """Returns the hooks; without a callback that follows all is as before."""
    found = trainer()
    if found is None:
        return
    why = "a training goes on where it stood"
    # Under the drivers' own hooks of it: all processes are there, with one random state.
    yield Hook(found, "fit", _fitting, why)
    yield Hook(EpochIterator, "__init__", _reading, why)
    yield Hook(CallbackList, "on_train_begin", _beginning, why)
    yield Hook(CallbackList, "on_epoch_end", _ending, why)
    why = "steps are followed without asking for their logs"
    yield Hook(CallbackList, "on_train_batch_begin", _stepping_on, why)
    yield Hook(CallbackList, "on_train_batch_end", _stepped, why)
    for name in ("evaluate", "predict"):
        yield Hook(found, name, _evaluating, "what a process is at can be seen from outside")


def trainer() -> Any:
    """Keras's class. Its import imports its framework: only that of the Keras backend."""
    name = _TRAINERS.get(keras.config.backend())
    return None if name is None else getattr(compat, name)


def _followers_in(callbacks: Any) -> tuple[Follower, ...]:
    given = callbacks.callbacks if isinstance(callbacks, CallbackList) else tree.flatten(callbacks)
    found = [one for one in given if isinstance(one, Follower)]
    for kind, count in Counter(type(one) for one in found).items():
        if count > 1:
            raise ArgumentError(f"fit was given {count} callbacks of {kind.__name__}: one can follow it")
    return tuple(sorted(found, key=lambda one: one.place))


@contextlib.contextmanager
def _followed_by(followers: tuple[Follower, ...], model: Any, epochs: int) -> Iterator[None]:
    token = _current.set(followers)
    try:
        for follower in followers:
            follower.fit_begins(model, epochs)
        yield
    finally:
        for follower in followers:
            follower.fit_ended()
        _current.reset(token)


def _of(callbacks: CallbackList) -> Iterator[Follower]:
    return (one for one in _current.get() if one in callbacks.callbacks)


def _stopping_of(callbacks: CallbackList) -> Iterator[Stopping]:
    if (found := _stopping.get()) is not None and found[0] is callbacks:
        yield found[1]


def _fitting(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        token = _stopping.set(None)
        try:
            followed = _followed_by(_followers_in(given.arguments["callbacks"]), self, given.arguments["epochs"])
            with recorder.phase("program"), followed:
                found = original(self, *args, **kwargs)
                if (own := _stopping.get()) is not None:
                    own[1].end()
                return found
        finally:
            _stopping.reset(token)

    return fit


def _evaluating(original: Any) -> Any:
    @functools.wraps(original)
    def entrance(*args: Any, **kwargs: Any) -> Any:
        with recorder.phase("evaluating"):
            return original(*args, **kwargs)

    return entrance


@calling
def _reading(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The first iterator that a fit makes is that of its training data."""
    original(self, *args, **kwargs)
    for follower in _current.get():
        follower.data_is_ready(self)


@calling
def _beginning(original: Any, self: Any, logs: Any = None) -> None:
    begin: Callable[[], None] = functools.partial(original, self, logs)
    for follower in _of(self):
        begin = functools.partial(follower.training_begins, self, begin)
    if taking_part.get() is not None and _stopping.get() is None:
        _stopping.set((self, Stopping(self._model)))
    for stopping in _stopping_of(self):
        stopping.begin(self.callbacks)
    begin()


@calling
def _stepping_on(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    original(self, batch, logs)
    for follower in _of(self):
        follower.step_begins()
    recorder.step_begins()


@calling
def _stepped(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    recorder.stepped()
    recorder.enter("program")
    original(self, batch, logs)
    for stopping in _stopping_of(self):
        stopping.after_step()
    for follower in _of(self):
        # Where Keras calls callbacks in another thread, none of them has asked for the logs.
        follower.step_ended(None if self._async_train else logs)
    recorder.enter("data")


@calling
def _ending(original: Any, self: Any, epoch: int, logs: Any = None) -> None:
    original(self, epoch, logs)
    for stopping in _stopping_of(self):
        stopping.after_epoch()
    for follower in _of(self):
        follower.epoch_ended(epoch, self)
