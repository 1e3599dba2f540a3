"""Models whose probabilities are 0 and 1 to the last bit, where losses by their logits are others than by themselves;
and what the processes of their tests run."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.support.runs import Result, fresh, scope, strategy, told

ROWS, BATCH, WIDTH = 16, 8, 8
RULES: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*z/kernel": ("model", None)}


class Centred(layers.Layer):
    """Looks at all rows and has an activation last."""

    def call(self, x: Any) -> Any:
        return ops.sigmoid(x - ops.mean(x, axis=0))


class Judging(layers.Layer):
    """Adds the loss itself, of probabilities that it is given."""

    def call(self, x: Any) -> Any:
        wanted = ops.cast(ops.arange(ops.shape(x)[-1]) % 2 == 0, x.dtype) * ops.ones_like(x)
        self.add_loss(ops.mean(keras.losses.binary_crossentropy(wanted, x)))
        return x


def of_ones_own(y: Any, p: Any) -> Any:
    """A loss of the user's own, of all rows."""
    each = keras.losses.binary_crossentropy(y, p)
    return each + ops.mean(each)


def _classes(y: Any, p: Any) -> Any:
    return keras.losses.categorical_crossentropy(y / ops.sum(y, axis=-1, keepdims=True), p)


# name -> (the activation of the last layer, layers behind it, the loss)
CASES: dict[str, tuple[str | None, tuple[type[layers.Layer], ...], Any]] = {
    "binary": ("sigmoid", (), "binary_crossentropy"),
    "classes": ("softmax", (), _classes),
    "own": ("sigmoid", (), of_ones_own),
    "centred": (None, (Centred,), "binary_crossentropy"),
    "judging": ("sigmoid", (Judging,), "binary_crossentropy"),
}


def trained(kind: str | None, zero: int, name: str) -> Result:
    """Trains and evaluates; `kind`: None for one device."""
    fresh()
    activation, behind, loss = CASES[name]
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(ROWS, 6)).astype("float32"), (rng.random((ROWS, 4)) > 0.5).astype("float32")
    y[:, 0] = 1.0
    wide = keras.initializers.RandomUniform(-40.0, 40.0, seed=3)
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        ends = [layers.Dense(4, activation, kernel_initializer=wide, name="z"), *(make() for make in behind)]
        model = keras.Sequential([layers.Input((6,)), layers.Dense(WIDTH, "tanh", name="a"), *ends])
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["binary_crossentropy"])
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0), **told(model)}
