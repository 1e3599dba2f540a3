"""Trainings in float8: scales and histories of largest values are of the whole batch, and of the whole gradient."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, scope, strategy, told

ROWS, BATCH, WIDTH = 13, 6, 6  # the last batch has one row


def stack() -> Any:
    return keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(12, activation="relu"), layers.LayerNormalization(), layers.Dense(3)]
    )


def attention() -> Any:
    """EinsumDense amid the native rows of a layer of Keras's."""
    x = keras.Input((4, WIDTH))
    h = layers.MultiHeadAttention(2, 4)(x, x)
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(h)))


class Mixing(layers.Layer):
    """Gives a layer of Keras's what all rows have made."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = layers.Dense(4)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return self.inner(x - ops.mean(x, axis=0)) + self.inner(ops.mean(x, axis=0, keepdims=True))


def mixing() -> Any:
    return keras.Sequential([keras.Input((WIDTH,)), layers.Dense(5), Mixing(), layers.Dense(3)])


class OwnStep(keras.Sequential):
    """A step of the user's own, with gradients by torch.autograd.grad."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        trainable = list(self.trainable_weights)
        gradients = torch.autograd.grad(loss, [v.value for v in trainable])
        with torch.no_grad():
            self.optimizer.apply(gradients, trainable)
        return {"loss": loss}


def own_step() -> Any:
    return OwnStep([keras.Input((WIDTH,)), layers.Dense(8, activation="relu"), layers.Dense(3)])


def shared() -> Any:
    """A layer that is called twice: torch adds up what its calls give."""
    x = keras.Input((WIDTH,))
    layer = layers.Dense(WIDTH, activation="tanh")
    return keras.Model(x, layers.Dense(3)(layer(layer(x))))


def remat() -> Any:
    with keras.RematScope(mode="full"):
        return stack()


CASES = {
    "stack": stack, "attention": attention, "mixing": mixing, "own step": own_step, "shared": shared, "remat": remat,
    "accumulating": stack, "frozen": stack, "scaled": stack,
}  # fmt: skip


def data(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    shape = (ROWS, 4, WIDTH) if name == "attention" else (ROWS, WIDTH)
    return rng.normal(size=shape).astype("float32"), rng.normal(size=(ROWS, 3)).astype("float32")


def distribution(kind: str | None, zero: int) -> Any:
    if kind == "found 2x2":
        return unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}))
    return strategy(kind, zero=zero)


def trained(kind: str | None, zero: int, name: str) -> Result:
    """Trains, evaluates; `kind`: None for one device."""
    fresh()
    with scope(distribution(kind, zero)), unidist.ledger() as book:
        model = CASES[name]()
        with warnings.catch_warnings():  # Keras names each layer that has no kernel
            warnings.simplefilter("ignore")
            model.quantize("float8")
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=2 if name == "accumulating" else None
        )
        if name == "scaled":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        if name == "frozen":
            model.layers[0].trainable = False
        model.compile(optimizer, "mse")
        x, y = data(name)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "_sent": len(book.events),
        "_gathered": sorted({e.purpose for e in book.events if e.purpose.startswith("no rule")}),
        **told(model),
    }


def simulated(devices: int, *args: Any) -> Result:
    """With another number of virtual devices than this process has."""
    unidist.use("sim", devices=devices)
    try:
        return trained(*args)
    finally:
        unidist.use("sim", devices=4)
