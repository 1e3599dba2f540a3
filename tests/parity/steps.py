"""Steps of a user's own on TensorFlow, as Keras's guides write them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.support import nets
from tests.support.runs import Result, told


class Trackers(keras.Sequential):
    """Its own loss, and metrics that it updates and resets by itself."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.criterion = keras.losses.MeanSquaredError()

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.criterion(y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.told(y, y_pred, loss)

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        return self.told(y, y_pred, self.criterion(y, y_pred))

    def told(self, y: Any, y_pred: Any, loss: Any) -> Any:
        self.tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self) -> Any:
        return [self.tracker, self.error]


class Adversaries(keras.Model):
    """Two models, two optimizers, two gradients in a step."""

    def __init__(self) -> None:
        super().__init__(name="both")
        self.maker = keras.Sequential([layers.Input((12,)), layers.Dense(4, name="c")], name="maker")
        inner = [layers.Dense(16, "tanh", name="a"), layers.Dense(8, "tanh", name="b"), layers.Dense(1, name="d")]
        self.judge = keras.Sequential([layers.Input((4,)), *inner], name="judge")
        self.criterion = keras.losses.BinaryCrossentropy(from_logits=True)
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = True

    def compile(self, optimizer: Any, second: Any) -> None:
        super().compile(optimizer)
        self.second = second

    def call(self, x: Any) -> Any:
        return self.judge(self.maker(x))

    def train_step(self, data: Any) -> Any:
        x, real = data
        for model, optimizer, wanted in ((self.judge, self.optimizer, 0.0), (self.maker, self.second, 1.0)):
            with tf.GradientTape() as tape:
                made = self.judge(self.maker(x, training=True), training=True)
                loss = self.criterion(ops.full_like(made, wanted), made)
                if model is self.judge:
                    logits = self.judge(real, training=True)
                    loss += self.criterion(ops.ones_like(logits), logits)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> Any:
        return [self.tracker]


def trackers(kind: str | None, zero: int) -> Result:
    x, y = _data()
    with nets.begun(kind, zero):
        model = Trackers(nets.plain().layers, name="plain")
        model.compile(nets.adam())
    history = model.fit(x, y, batch_size=nets.BATCH, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=nets.EVALUATED, verbose=0, return_dict=True)
    return {"history": history, "evaluate": evaluated, **told(model)}


def two_optimizers(kind: str | None, zero: int) -> Result:
    x, y = _data()
    with nets.begun(kind, zero):
        model = Adversaries()
        model.compile(nets.adam(), nets.adam())
    history = model.fit(x, y, batch_size=nets.BATCH, epochs=2, shuffle=False, verbose=0).history
    # Over DTensor the model's own optimizer has slots for what the other one updates, too.
    return {"history": history, **told(model), "slots": []}


def _data() -> tuple[Any, Any]:
    x, y = nets.rows()
    return x, ops.convert_to_numpy(ops.one_hot(y, nets.CLASSES))
