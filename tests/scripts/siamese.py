"""A siamese network: two rows go through one tower; alike are to be near, unlike to be a margin apart."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, BATCH, SIZE = 16, 8, 6


def distance(pair: Any) -> Any:
    first, second = pair
    return ops.sqrt(ops.maximum(ops.sum(ops.square(first - second), axis=1, keepdims=True), 1e-7))


def contrastive(margin: float) -> Any:
    def contrastive_loss(y: Any, p: Any) -> Any:
        y = ops.cast(y, p.dtype)
        return ops.mean((1 - y) * ops.square(p) + y * ops.square(ops.maximum(margin - p, 0)))

    return contrastive_loss


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(6)
    first, second = (rng.uniform(size=(ROWS, SIZE, SIZE, 1)).astype("float32") for _ in range(2))
    apart = rng.integers(0, 2, ROWS).astype("float32")
    picture = keras.Input((SIZE, SIZE, 1))
    x = layers.BatchNormalization(epsilon=0.1, name="light")(picture)
    x = layers.AveragePooling2D(2)(layers.Conv2D(4, 3, activation="tanh", name="conv")(x))
    x = layers.BatchNormalization(epsilon=0.1, name="norm")(layers.Flatten()(x))
    tower = keras.Model(picture, layers.Dense(8, "tanh", name="code")(x), name="tower")
    inputs = keras.Input((SIZE, SIZE, 1)), keras.Input((SIZE, SIZE, 1))
    near = layers.Lambda(distance, output_shape=(1,))([tower(one) for one in inputs])
    near = layers.BatchNormalization(epsilon=0.1, name="scaled")(near)
    model = keras.Model(list(inputs), layers.Dense(1, "sigmoid", name="apart")(near), name="siamese")
    model.compile(keras.optimizers.RMSprop(0.005, epsilon=1e-3), contrastive(1.0), metrics=["accuracy"])
    history = model.fit(
        [first, second],
        apart,
        batch_size=BATCH,
        epochs=steps,
        shuffle=False,
        verbose=0,
        validation_data=([first[:5], second[:5]], apart[:5]),
    ).history
    return {
        **history,
        "predict": model.predict([first, second], batch_size=BATCH, verbose=0),
        "weights": model.get_weights(),
    }
