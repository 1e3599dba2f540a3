"""A mixture of experts: a router sends each token to one expert, which has room for so many; the experts' load is
balanced by a loss that the router adds."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, BATCH, TOKENS, WIDTH, EXPERTS, WORDS = 20, 8, 4, 8, 3, 12


class Router(layers.Layer):
    """Which expert takes which token, in the order of the tokens of the whole batch."""

    def __init__(self, room: int, **options: Any) -> None:
        super().__init__(**options)
        self.room = room
        self.route = layers.Dense(EXPERTS, name="route")

    def call(self, tokens: Any) -> Any:
        chances = ops.softmax(self.route(tokens), axis=-1)
        gate, expert = ops.max(chances, axis=-1), ops.argmax(chances, axis=-1)
        chosen = ops.one_hot(expert, EXPERTS)
        self.add_loss(0.1 * EXPERTS * ops.sum(ops.mean(chosen, axis=0) * ops.mean(chances, axis=0)))
        place = ops.cumsum(chosen, axis=0) * chosen
        chosen = chosen * ops.cast(ops.less_equal(place, self.room), "float32")
        return chosen * ops.expand_dims(gate, -1)


class Experts(layers.Layer):
    def __init__(self, room: int, **options: Any) -> None:
        super().__init__(**options)
        self.router = Router(room, name="router")
        self.experts = [
            keras.Sequential([layers.Dense(16, "relu", name="up"), layers.Dense(WIDTH, name="down")], name=f"expert{k}")
            for k in range(EXPERTS)
        ]

    def call(self, x: Any) -> Any:
        tokens = ops.reshape(x, (-1, WIDTH))
        weight = self.router(tokens)
        answers = ops.stack([expert(tokens) for expert in self.experts], axis=1)
        return ops.reshape(ops.sum(answers * ops.expand_dims(weight, -1), axis=1), ops.shape(x))


def run(steps: int = 2, room: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    words = rng.integers(0, WORDS, (ROWS, TOKENS)).astype("int32")
    kind = rng.integers(0, 2, ROWS).astype("int32")
    inputs = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    x = layers.LayerNormalization(name="norm")(x + Experts(room, name="experts")(x))
    x = layers.Dense(8, "relu", name="hidden")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(2, "softmax", name="kind")(x), name="switch")
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(words, kind, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history
    return {
        **history,
        "predict": model.predict(words, verbose=0),
        "weights": model.get_weights(),
    }
