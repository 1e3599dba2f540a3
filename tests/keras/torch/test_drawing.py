"""Layers of the user's own that draw from the process's generators: each virtual rank draws what one device draws."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist

MESH = unidist.Mesh({"model": 4})


class Noisy(layers.Layer):  # type: ignore[misc]
    """Draws without a seed."""

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        x = x * np.random.uniform(0.5, 1.5) + keras.random.normal(ops.shape(x)) + random.random()
        return torch.nn.functional.dropout(x, 0.2) + torch.randn_like(x)


def trained(strategy: Any, made: str) -> tuple[list[float], list[Any], float]:
    """`made`: when Keras's global generator is: "before" the scope, "inside" of it, or by the first "step"."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    if made == "before":
        keras.random.normal((1,))
    with strategy.scope() if strategy else contextlib.nullcontext():
        if made == "inside":
            keras.random.normal((1,))
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="up"), Noisy(), layers.Dense(3)], name="net")
        model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(14, 4)), rng.normal(size=(14, 3))
    losses = model.fit(x, y, batch_size=5, epochs=2, verbose=0, shuffle=False).history["loss"]
    then = float(keras.random.uniform(())) + random.random()
    return losses, [np.asarray(v) for v in model.weights], then


@pytest.mark.parametrize("made", ["before", "inside", "step"])
@pytest.mark.parametrize("kind", ["data", "model"])
def test_each_rank_draws_what_one_device_draws(kind: str, made: str) -> None:
    rules = unidist.LayoutMap(MESH, {"net/up/kernel": (None, "model")})
    strategy = unidist.DataParallel() if kind == "data" else unidist.ModelParallel(MESH, rules)
    losses, weights, then = trained(None, made)
    found = trained(strategy, made)
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    for a, b in zip(found[1], weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert found[2] == then
