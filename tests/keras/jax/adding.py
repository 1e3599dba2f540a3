"""What the processes of the tests run: losses that layers add, where a loss is where another one was in memory."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.support.runs import Result, fresh, scope, strategy, told


class Adding(layers.Layer):
    """Adds a loss. Where others remember losses of a trace that has ended, it is in the place of one of theirs."""

    def __init__(self, *others: Any, **options: Any) -> None:
        super().__init__(**options)
        self._others = lambda: others  # Behind a function they are no layers of this one.
        self.remembered: list[int] = []

    def call(self, x: Any) -> Any:
        loss = 0.1 * ops.mean(ops.square(x))
        self.add_loss(loss)
        for other in self._others():
            self.remembered.append(len(other._loss_ids))
            if other._loss_ids:
                other._loss_ids.add(id(loss))
        return x


class Penalized(layers.Dense):
    """Adds a loss of its outputs, and keeps it, so that no other takes its place."""

    def __init__(self, kept: list[Any], **options: Any) -> None:
        super().__init__(8, **options)
        self._keep = lambda loss: kept.append(loss)

    def call(self, x: Any, training: bool | None = None) -> Any:
        outputs = super().call(x, training=training)
        loss = ops.mean(ops.square(outputs))
        self._keep(loss)
        self.add_loss(loss)
        return outputs


def retraced(kind: str | None, zero: int) -> Result:
    """Steps are traced for batches of two sizes."""
    fresh()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(14, 12)).astype("float32"), rng.normal(size=(14, 3)).astype("float32")
    with scope(None if kind is None else strategy(kind, zero=zero)):
        later = Adding(name="later")
        model = keras.Sequential(
            [layers.Input((12,)), layers.Dense(8, name="column"), Adding(later), later, layers.Dense(3, name="row")]
        )
        model.compile("sgd", "mse")
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    found = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    return {"history": history, "evaluate": found, **told(model)}


def tried(zero: int) -> list[int]:
    """How many losses a layer within another remembers, whose call was traced to find out whether rows are alone."""
    fresh()
    x = np.zeros((8, 5, 12), "float32")
    with scope(strategy("dp", zero=zero)):
        inner = Penalized([], name="column")
        wrapped = layers.TimeDistributed(inner)
        adding = Adding(inner)
        model = keras.Sequential([layers.Input((5, 12)), wrapped, adding, layers.Dense(3, name="row")])
        model.compile("sgd", "mse")
    adding.remembered.clear()
    model.fit(x, np.zeros((8, 5, 3), "float32"), batch_size=8, verbose=0)
    return list(adding.remembered)
