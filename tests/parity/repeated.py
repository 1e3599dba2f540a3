"""Embeddings whose ids repeat in a batch, under optimizers that treat the gradients of an id one by one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, optimizers

import unidist
from tests.support.runs import Result, fresh, scope, strategy, told

OPTIMIZERS: dict[str, Any] = {
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5, clipnorm=0.5),
    "adadelta": lambda: optimizers.Adadelta(0.5, use_ema=True, ema_overwrite_frequency=2),
    "adamax": lambda: optimizers.Adamax(0.01),
    "lamb": lambda: optimizers.Lamb(0.01, use_ema=True, ema_momentum=0.9),
}
CUTS: dict[str, Any] = {"vocabulary": ("model", None), "features": (None, "model")}


def trained(cut: str | None, zero: int, name: str, is_eager: bool = False) -> Result:
    """By a rule that cuts the table, or by layouts that are found ("found"); None: on one device."""
    fresh()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (12, 5)).astype("int32"), rng.normal(size=(12, 1)).astype("float32")
    x[:, 0] = 3
    with scope(_strategy(cut, zero)):
        model = keras.Sequential(
            [
                layers.Input((5,), dtype="int32"),
                layers.Embedding(16, 8, name="table"),
                layers.GlobalAveragePooling1D(),
                layers.Dense(1, name="out"),
            ]
        )
        model.compile(OPTIMIZERS[name](), "mse", run_eagerly=is_eager)
        model.optimizer.build(model.trainable_variables)
        history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


def _strategy(cut: str | None, zero: int) -> Any:
    if cut == "found":
        return unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}), zero=zero)
    return None if cut is None else strategy("2x2", {".*table/embeddings": CUTS[cut]}, zero=zero)
