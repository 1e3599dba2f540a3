"""Fits that one process wishes to stop: what each process has trained then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import unidist
from unidist import session

STEPS, BATCH = 400, 4


class Counting(keras.callbacks.Callback):
    """Counts steps, and does something of another thread's or a signal's at one."""

    def __init__(self, at: int, does: Callable[[Any], None]) -> None:
        super().__init__()
        self.steps, self._at, self._does = 0, at, does

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self._at:
            self._does(self.model)


class StopsAtStep(keras.callbacks.Callback):
    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self._at:
            self.model.stop_training = True


class StopsAtEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def _stop(model: Any) -> None:
    model.stop_training = True


def _in_thread(model: Any) -> None:
    thread = threading.Thread(target=_stop, args=(model,))
    thread.start()
    thread.join()


def stop(kind: str, which: tuple[int, ...]) -> tuple[int, bool, list[Any]]:
    """(steps, model.stop_training behind the fit, weights), where the processes `which` wish to stop."""
    place = int(session.backend().process_index())
    wishes, counting = (
        place in which,
        Counting(5, _in_thread if kind == "thread" and place in which else lambda _: None),
    )
    keras.utils.set_random_seed(2)
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    rows = STEPS * BATCH if kind != "epoch" else 5 * BATCH
    rng = np.random.default_rng(0)
    data = rng.normal(size=(rows, 3)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")
    # A process that does not wish has no such callback, or has one that does not.
    own = {
        "step": [StopsAtStep(6 if wishes else STEPS + 1)],
        "callback of one": [StopsAtStep(6)] if wishes else [],
        "epoch": [StopsAtEpoch()] if wishes else [],
        "thread": [],
    }[kind]
    with unidist.ledger() as traffic:
        model.fit(*data, batch_size=BATCH, epochs=4, verbose=0, callbacks=[counting, *own])
    assert traffic.events
    return counting.steps, model.stop_training, [np.asarray(v) for v in model.weights]
