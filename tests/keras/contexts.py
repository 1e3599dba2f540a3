"""A small language model whose sequences an axis of contexts cuts, and what the processes of its tests run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, scope, told

ROWS, BATCH, WIDTH, HEADS, WORDS = 6, 4, 8, 4, 12
WINDOW = 5  # longer than a part, shorter than a sequence


class Positions(layers.Layer):
    """Positions by numbers of the global length, and weights of each."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(16, shape[-1]), initializer="normal", name="table")

    def call(self, x: Any) -> Any:
        places = ops.arange(ops.shape(x)[1], dtype="float32")
        waves = ops.sin(places[:, None] / ops.arange(1, x.shape[-1] + 1, dtype="float32"))
        return x + waves + self.table[: ops.shape(x)[1]]


class Decoder(layers.Layer):
    """Attends to what came before, in a window, with a bias for each distance (ALiBi)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.2, seed=4, name="attention")
        self.norm, self.other = layers.LayerNormalization(), layers.LayerNormalization()
        self.up, self.down = layers.Dense(2 * WIDTH, "gelu"), layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.norm.build(shape)
        self.other.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * WIDTH))

    def call(self, x: Any, training: bool = False) -> Any:
        given = self.norm(x)
        places = ops.arange(ops.shape(x)[1])
        near = places[:, None] - places[None, :] < WINDOW
        mixed = self.attention(given, given, attention_mask=near[None], use_causal_mask=True, training=training)
        scores = ops.einsum("bqd,bkd->bqk", given, given) / WIDTH - 0.1 * ops.abs(places[:, None] - places[None, :])
        x = x + mixed + 0.1 * ops.matmul(ops.softmax(scores), given)
        return x + self.down(self.up(self.other(x)))


class Masked(layers.Layer):
    """Attends to what came before, by torch's attention: of a mask's places, or of all."""

    def __init__(self, window: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.window, self.norm = window, layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        given, places = self.norm(x), ops.arange(ops.shape(x)[1])
        near = None if self.window is None else (places[:, None] - places[None, :] < self.window)[None]
        return x + self.attention(given, given, attention_mask=near, use_causal_mask=True, training=training)


def going_round(length: int) -> Any:
    given = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(WORDS, WIDTH)(given))
    for window in (None, 3):
        x = Masked(window)(x)
    return keras.Model(given, layers.Dense(WORDS, name="words")(layers.LayerNormalization()(x)))


def net(length: int) -> Any:
    given = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(WORDS, WIDTH, mask_zero=True)(given))
    x = Decoder()(x)
    return keras.Model(given, layers.Dense(WORDS, name="words")(layers.LayerNormalization()(x)))


def trained(
    sizes: dict[str, int] | None,
    zero: int,
    length: int,
    attention: str = "auto",
    batch: int = BATCH,
    rows: int = ROWS,
    build: str = "net",
) -> Result:
    """Trains on the next token; `sizes`: of the mesh, None for one device. Of 5 rows a batch, places have weights."""
    fresh()
    rng = np.random.default_rng(5)
    x = rng.integers(1, WORDS, (rows, length))
    x[1, -3:] = 0
    chosen = None
    if sizes is not None:
        chosen = unidist.ModelParallel(unidist.Mesh(sizes), zero=zero, attention=attention, exact_random=True)
    with scope(chosen), unidist.ledger() as book:
        model = globals()[build](length)
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
        given = {"x": x, "y": np.roll(x, -1, 1), "batch_size": batch, "verbose": 0}
        if batch != BATCH:
            given["sample_weight"] = rng.uniform(size=x.shape).astype("float32")
        history = model.fit(**given, epochs=2, shuffle=False).history
        evaluated = model.evaluate(**given)
        predicted = model.predict(x, batch_size=batch, verbose=0)
    sent = Counter(event.op for event in book.events if "context" in event.axes)
    return {
        "history": history,
        "evaluated": evaluated,
        "predicted": predicted,
        "_sent": sent,
        **told(model),
    }


def made(sizes: dict[str, int], **options: Any) -> None:
    unidist.ModelParallel(unidist.Mesh(sizes), **options)
