"""What the process of test_scattering runs: a model that scatters features which its kernel cuts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import unidist
from tests.support.runs import fresh, scope


class Adding(layers.Layer):  # type: ignore[misc]
    def __init__(self, to: list[int]) -> None:
        super().__init__()
        self.to = np.asarray(to)

    def call(self, x: Any) -> Any:
        return x.at[:, self.to].add(x[:, : len(self.to)])


def added(to: list[int]) -> tuple[Any, Any, Any]:
    """(one row, the kernel, what is predicted): two devices cut the features, and add the first ones to others."""
    fresh()
    x = np.random.default_rng(1).normal(size=(1, 6)).astype("float32")
    mesh = unidist.Mesh({"data": 2, "model": 2})
    with scope(unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {".*kernel": (None, "model")}))):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, use_bias=False), Adding(to)])
        return x, keras.ops.convert_to_numpy(model.layers[0].kernel), model.predict(x, verbose=0)
