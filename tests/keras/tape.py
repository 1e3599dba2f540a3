"""Steps of the user's own on TensorFlow, that look at what a tape gives."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.support.runs import Result, fresh, scope, strategy, told


class Clipping(keras.Sequential):
    """Clips gradients by their norm by hand, and reports it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        clipped, norm = tf.clip_by_global_norm(gradients, 0.05)
        # What is not changed is sparse still.
        self.optimizer.apply([gradients[0], *clipped[1:]], weights)
        return {"loss": loss, "norm": norm, "parts": tf.add_n([tf.reduce_sum(tf.abs(g)) for g in gradients[1:]])}


class Penalized(keras.Sequential):
    """What is asked for beside weights is this step's own business."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                scale = tf.constant(1.5)
                inner.watch(scale)
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True) * scale)
            slope = inner.gradient(loss, scale)
            loss = loss + 0.1 * slope
        gradients = {"weights": tape.gradient(loss, weights)}
        self.optimizer.apply(gradients["weights"], weights)
        return {"loss": loss, "slope": slope}


STEPS: dict[str, Any] = {"clipping": Clipping, "penalized": Penalized}


def stepped(kind: str | None, zero: int, name: str) -> Result:
    fresh()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, (14, 3)).astype("int32"), rng.normal(size=(14, 2)).astype("float32")
    with scope(strategy(kind, **({} if kind is None else {"zero": zero}))):
        model = STEPS[name]([layers.Input((3,), dtype="int32"), layers.Embedding(5, 4, name="e"), layers.Flatten()])
        model.add(layers.Dense(6, "tanh", name="a"))
        model.add(layers.Dense(2, name="b"))
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss="mse")
        history = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0).history
        return {**told(model), "history": history}
