"""Contrastive learning: two views of a row are to be alike, and unlike the views of all other rows of the batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.scripts.stepping import OwnStep

ROWS, BATCH, WIDTH = 20, 8, 8


def views() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    return tuple(rows + 0.1 * rng.normal(size=rows.shape).astype("float32") for _ in range(2))


def likeness(first: Any, second: Any) -> Any:
    """One number: how well each row of the first finds its own in the second, and the other way round."""
    first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
    logits = ops.matmul(first, ops.transpose(second)) / 0.3
    labels = ops.arange(ops.shape(first)[0])
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            ops.concatenate([labels, labels]), ops.concatenate([logits, ops.transpose(logits)]), from_logits=True
        )
    )


class Contrastive(OwnStep):
    def __init__(self) -> None:
        super().__init__(name="contrastive")
        self.encoder = keras.Sequential(
            [layers.Input((WIDTH,)), layers.Dense(16, "relu", name="wide"), layers.Dense(8, "relu", name="narrow")],
            name="encoder",
        )
        self.head = keras.Sequential(
            [layers.Input((8,)), layers.Dense(16, "relu", name="up"), layers.Dense(8, name="down")], name="head"
        )

    def call(self, x: Any, training: Any = None) -> Any:
        return tuple(self.head(self.encoder(view)) for view in x)

    def objective(self, x: Any, outputs: Any) -> Any:
        return likeness(*outputs)


class ByComputeLoss(Contrastive):
    """Where the step computes its loss by a method that Keras knows."""

    def objective(self, x: Any, outputs: Any) -> Any:
        return self.compute_loss(x=x, y_pred=outputs)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return likeness(*y_pred)


def _train(model: Any, steps: int) -> dict[str, Any]:
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3))
    x = views()
    history = model.fit(x, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history
    return {"loss": history["loss"], "features": model.encoder.predict(x[0], verbose=0), "weights": model.get_weights()}


def run(steps: int = 2) -> dict[str, Any]:
    return _train(ByComputeLoss(), steps)


def run_by_hand(steps: int = 2) -> dict[str, Any]:
    return _train(Contrastive(), steps)
