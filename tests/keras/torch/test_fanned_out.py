"""What layers that are cut by their outputs take lives as long as somebody needs it, and no longer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import torch

import unidist


class Noting(keras.layers.Layer):
    """Gives on what it gets, as a tensor of its own, and notes which tensors these were."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.given: list[weakref.ref[torch.Tensor]] = []

    def call(self, x: Any) -> Any:
        y = x * 1.0
        if isinstance(y, torch.Tensor) and y.device.type != "meta":
            self.given.append(weakref.ref(y))
        return y


def test_the_input_of_column_layers_is_freed_after_its_step() -> None:
    noting = Noting(name="noting")
    mesh = unidist.Mesh({"model": 4})
    layout_map = unidist.LayoutMap(mesh, {".*(left|right)/kernel": (None, "model")})
    with unidist.ModelParallel(mesh, layout_map).scope():
        inputs = keras.Input((6,))
        x = noting(keras.layers.Dense(8, name="first")(inputs))
        both = [keras.layers.Dense(4, name=name)(x) for name in ("left", "right")]
        model = keras.Model(inputs, keras.layers.Add()(both))
        model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    with unidist.ledger() as traffic:
        model.fit(rng.normal(size=(12, 6)), rng.normal(size=(12, 4)), batch_size=4, verbose=0)
    assert traffic.count("all_reduce") > 0
    gc.collect()
    assert len(noting.given) == 3  # the first rank's of three steps
    assert [one for one in noting.given if one() is not None] == []
