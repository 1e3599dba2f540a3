"""A layer of experts with a gate of each kind, and its training."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

import unidist
from tests.keras.hub import zoo

EXPERTS, WIDTH = 4, 8


class Bank(keras.layers.Layer):
    """What each expert makes of each row, in a way of its own."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how = how
        if how == "draws":
            self.dropout = keras.layers.Dropout(0.5, seed=1)

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(EXPERTS, WIDTH, WIDTH), name="kernel")

    def call(self, x: Any, training: bool = False) -> Any:
        out = ops.tanh(ops.einsum("bd,edh->ebh", x, self.kernel))
        if self.how == "draws":
            return self.dropout(out, training=training)
        return ops.softmax(out, axis=0) if self.how == "mixes" else out


class Gated(keras.layers.Layer):
    """Experts with weights from what `how` says."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how, self.bank, self.gate = how, Bank(how, name="bank"), keras.layers.Dense(EXPERTS, name="gate")

    def build(self, shape: Any) -> None:
        self.bank.build(shape)
        self.gate.build(shape)
        if self.how == "learned zeros":
            self.scale = self.add_weight(shape=(EXPERTS, 1), initializer="zeros", name="scale")

    def call(self, x: Any, training: bool = False) -> Any:
        scores = self.gate(x) + ops.convert_to_tensor([100.0 * (self.how == "all to one"), 0.0, 0.0, 0.0])
        chances = ops.softmax(scores)
        best = ops.one_hot(ops.argmax(scores, axis=-1), EXPERTS)
        weights = ops.transpose(chances * best)
        if self.how == "learned zeros":
            weights = weights * 0.0 + self.scale
        out = self.bank(x, training=training)
        if self.how == "einsum":
            return ops.einsum("be,ebd->bd", ops.transpose(weights), out)
        if self.how == "looks":
            return ops.sum(out * weights[:, :, None], axis=0) + ops.max(out)
        return ops.sum(out * weights[:, :, None], axis=0)


def weighed(how: str, strategy: Any) -> tuple[list[np.ndarray], str]:
    """Weights behind some steps, and what the strategy says of the layers."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = keras.Input((WIDTH,))
    model = keras.Model(x, keras.layers.Dense(2, name="head")(x + Gated(how, name="gated")(x)))
    if strategy is not None:
        model = unidist.parallelize(model, strategy)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    given = rng.normal(size=(6, WIDTH)).astype("float32"), rng.normal(size=(6, 2)).astype("float32")
    with zoo.quietly():
        model.fit(*given, batch_size=6, epochs=3, shuffle=False, verbose=0)
    said = "" if strategy is None else "; ".join(unidist.describe(model).why.values())
    return [np.asarray(v) for v in model.weights], said
