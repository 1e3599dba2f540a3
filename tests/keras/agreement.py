"""Processes whose last one was given something else, and what all raise."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from tests.support.nets import plain
from tests.support.runs import fresh
from unidist import log


def _is_other() -> bool:
    here = unidist.backend()
    return here.process_index() == here.process_count() - 1


class _Raises(keras.callbacks.Callback):
    """Doubles the learning rate after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 2 * float(np.asarray(self.model.optimizer.learning_rate))


def _with_weights(model: Any) -> None:
    first = model.layers[0]
    first.set_weights([w + 0.5 for w in first.get_weights()])


def _loss(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(keras.ops.one_hot(y[..., 0] if len(y.shape) > 1 else y, 4) - p), -1)


# What the last process does otherwise.
OTHERWISE: dict[str, dict[str, Any]] = {
    "learning rate": {"optimizer": lambda: keras.optimizers.SGD(0.02)},
    "clipnorm": {"optimizer": lambda: keras.optimizers.SGD(0.01, clipnorm=1.0)},
    "optimizer": {"optimizer": lambda: keras.optimizers.Adam(0.01)},
    "loss": {"loss": lambda: _loss},
    "weights": {"before": _with_weights},
    "bins": {"bins": (0.0, 0.2)},
    "a callback": {"callbacks": lambda: [_Raises()]},
    "epochs": {"epochs": 3},
    "nothing": {},
}


def fitted(how: str) -> tuple[str, float]:
    """(the error or nothing, the loss)."""
    fresh()
    given = OTHERWISE[how] if _is_other() else {}
    rows = np.random.default_rng(0).normal(size=(32, 12)).astype("float32")
    classes = (np.arange(32) % 4).astype("int32")
    with unidist.DataParallel().scope():
        bins = keras.layers.Discretization(given.get("bins", (0.0, 0.1)), name="bins")
        model = keras.Sequential([keras.Input((12,)), bins, *plain().layers]) if how == "bins" else plain()
        loss: Callable[[], Any] = given.get("loss", lambda: keras.losses.SparseCategoricalCrossentropy(True))
        model.compile(given.get("optimizer", lambda: keras.optimizers.SGD(0.01))(), loss())
    if "before" in OTHERWISE[how]:
        model.predict(rows[:8], verbose=0)  # places it: before that all take the first process's weights
    if "before" in given:
        given["before"](model)
    callbacks = given.get("callbacks", list)()
    try:
        history = model.fit(
            rows, classes, batch_size=8, epochs=given.get("epochs", 2), callbacks=callbacks, shuffle=False, verbose=0
        ).history
    except unidist.DesyncError as error:
        return str(error), 0.0
    return "", float(history["loss"][-1])


def loaded(path: str, what: str) -> tuple[str, str]:
    """(kind, text) of the error where the last process has no file, and then (nothing) where all have it."""
    fresh()
    with unidist.DataParallel().scope():
        model = plain()
        model.compile("sgd", "mse")
    model.predict(np.zeros((4, 12), "float32"), verbose=0)
    full = f"{path}.{'weights.h5' if what == 'weights' else 'keras'}"
    (model.save_weights if what == "weights" else model.save)(full)

    def load(file: str) -> None:
        if what == "weights":
            model.load_weights(file)
            return
        with unidist.DataParallel().scope():
            keras.models.load_model(file)

    load(full)
    try:
        load(full.replace(path, path + "-elsewhere") if _is_other() else full)
    except (OSError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def logged(ranks: str) -> list[str]:
    """What this process writes of a model that is placed."""
    fresh()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as written:
        patch.setenv("UNIDIST_LOG", "info")
        patch.setenv("UNIDIST_LOG_RANKS", ranks)
        log.start(unidist.process_index)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="net")
        strategy = unidist.DataParallel()
        for _ in range(2):
            unidist.parallelize(model, strategy)
        patch.undo()
        log.start(unidist.process_index)
    return written.getvalue().splitlines()
