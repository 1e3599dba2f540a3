"""Models of blocks whose activations are recomputed in backward, and what the processes of their tests run."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import PAIR, Result, fresh, scope, strategy, told

# The last batch is smaller; on JAX it would be another program.
ROWS, BATCH = (8 if keras.config.backend() == "jax" else 10), 4
LENGTH, WIDTH = 5, 8
COUNT = 2  # of blocks


class Block(layers.Layer):
    """Draws, keeps state, adds a loss, and hides from attention what is masked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True
        self.mixing = layers.MultiHeadAttention(2, 4, dropout=0.3, seed=2, name="attention")
        self.norm, self.statistics = layers.LayerNormalization(), layers.BatchNormalization()
        self.column, self.drop = layers.Dense(2 * WIDTH, "gelu", name="column"), layers.Dropout(0.2, seed=3)
        self.row = layers.Dense(WIDTH, name="row")

    def build(self, shape: Any) -> None:
        self.mixing.build(shape, shape)
        self.norm.build(shape)
        self.statistics.build(shape)
        self.column.build(shape)
        self.row.build((*shape[:-1], self.column.units))

    def call(self, x: Any) -> Any:
        x = x + self.mixing(self.norm(x), self.norm(x))
        found = self.row(self.drop(self.column(self.statistics(x))))
        self.add_loss(0.01 * ops.mean(ops.square(found)))
        return x + found


def net() -> Any:
    given = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(12, WIDTH, mask_zero=True)(given)
    for k in range(COUNT):
        x = Block(name=f"block_{k}")(x)
    return keras.Model(given, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def trained(kind: str | None, zero: int, remat: str, rows: int = ROWS) -> Result:
    """Trains; `kind`: None for one device."""
    fresh()
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 12, (rows, LENGTH)), rng.normal(size=(rows, 2)).astype("float32")
    chosen = None if kind is None else strategy(kind, PAIR, zero=zero, exact_random=True, remat=remat)
    with scope(chosen), unidist.ledger() as book:
        model = net()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    told_of = {} if chosen is None else unidist.describe(model).why
    again = [path for path, why in told_of.items() if "recomputed" in why]
    return {"history": history, "_sent": len(book.events), "_again": again, **told(model)}


class Wide(layers.Layer):
    """Ends within one of its layers, when backward has computed again what it needs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down = layers.Dense(64 * WIDTH, "gelu"), layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(x))


def peak(remat: str) -> tuple[int, int]:
    """The bytes of tensors in a step of eight wide blocks that live at most at once, and behind it; Keras on torch."""
    from tests.support.saving import Held

    fresh()
    with unidist.DataParallel(remat=remat).scope():
        given = keras.Input((LENGTH, WIDTH))
        out = given
        for _ in range(8):
            out = Wide()(out)
        model = keras.Model(given, layers.Dense(2)(layers.Flatten()(out)))
        model.compile("sgd", "mse")
    x, y = np.zeros((128, LENGTH, WIDTH), "float32"), np.zeros((128, 2), "float32")
    model.train_on_batch(x, y)
    gc.disable()
    try:
        with Held() as held:
            model.train_on_batch(x, y)
            return held.most, held.now
    finally:
        gc.enable()
