"""A plan on torch calls the model without values: what it says that layers send is what they send, to the byte."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import unidist
from tests.support.sampling import unless_all

# Sent behind the layers: gradients, and what is logged.
BEHIND = ("gradient", "gradients", "metrics", "logs")


class Contrast(layers.Layer):  # type: ignore[misc]
    """Looks at all rows."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.mean(ops.square(x @ ops.transpose(x))))
        return x - ops.mean(x, axis=0)


class Reads(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x * float(ops.convert_to_numpy(ops.max(x)) > 0)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


class Moves(layers.Layer):  # type: ignore[misc]
    """Between a column and a row layer: needs all features."""

    def call(self, x: Any) -> Any:
        return ops.cumsum(ops.flip(x, -1), -1)


def mlp(*between: Any, **options: Any) -> keras.Model:
    x = keras.Input((8,))
    y = layers.Dense(16, **options)(layers.Dense(8)(x))
    for layer in between:
        y = layer(y)
    return keras.Model(x, layers.Dense(4)(layers.Dense(8)(y)))


def image() -> keras.Model:
    x = keras.Input((6, 6, 3))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3)(layers.RandomFlip()(x)))
    y = layers.Dropout(0.3)(layers.GaussianNoise(0.1)(ops.relu(y)))
    return keras.Model(x, layers.Dense(4)(layers.Dense(16, "relu")(layers.Flatten()(y))))


def recurrent() -> keras.Model:
    x = keras.Input((5,), dtype="int32")
    y = layers.Bidirectional(layers.GRU(8, return_sequences=True))(layers.Embedding(12, 8, mask_zero=True)(x))
    return keras.Model(x, layers.Dense(4)(layers.LSTM(8, dropout=0.2)(y)))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "softmax between": lambda: mlp(layers.Softmax(), layers.Dropout(0.5)),
    "all features between": lambda: mlp(Moves()),
    "all rows": lambda: mlp(Contrast()),
    "images": image,
    "recurrent": recurrent,
    "regularized": lambda: mlp(layers.ReLU(), kernel_regularizer="l2", activity_regularizer="l1"),
}
MESHES: dict[str, dict[str, int]] = {"data": {"data": 2}, "model": {"model": 2}, "dataxmodel": {"data": 2, "model": 2}}
# Each model once, and two on each mesh.
SOME = [(name, [*MESHES][k]) for name, k in zip(MODELS, (1, 2, 0, 0, 2, 1), strict=True)]


def of_layers(ledger: unidist.Ledger) -> Counter[tuple[str, tuple[str, ...], str, Any]]:
    return Counter((e.op, e.axes, e.purpose, e.bytes) for e in ledger.events if e.purpose not in BEHIND)


def fitted(model: keras.Model, mesh: unidist.Mesh) -> tuple[keras.Model, Any, Any]:
    with unidist.ModelParallel(mesh).scope() if "model" in mesh.axis_names else unidist.DataParallel(mesh).scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rng = np.random.default_rng(0)
        shape = (7, *model.input_shape[1:])
        x = rng.integers(1, 12, shape) if model.inputs[0].dtype == "int32" else rng.normal(size=shape)
        y = rng.normal(size=(7, 4)).astype("float32")
        model.train_on_batch(x, y)
    return model, x, y


@pytest.mark.parametrize(("name", "axes"), unless_all(SOME, list(itertools.product(MODELS, MESHES))))
def test_layers_send_what_was_rehearsed(name: str, axes: str) -> None:
    sizes = MESHES[axes]
    mesh = unidist.Mesh(sizes)
    unidist.use("sim", devices=mesh.size)
    model, x, y = fitted(MODELS[name](), mesh)
    with unidist.ledger() as sent:
        model.train_on_batch(x, y)
    with unidist.ledger() as heard:
        plan = unidist.plan(model, mesh, batch=7)
    assert (plan.estimated, heard.count()) == ("", 0)
    assert of_layers(plan.predicted) == of_layers(sent)
    assert "data" not in sizes or any("data" in e.axes for e in plan.predicted.events)
    assert "model" not in sizes or any("model" in e.axes for e in plan.predicted.events)


def test_a_rehearsed_model_is_as_before() -> None:
    def state(model: keras.Model) -> list[Any]:
        found = []
        for layer in model._flatten_layers():
            marks = {
                k: id(v) for k, v in vars(layer).items() if k.startswith("_unidist_") or k in ("call", "input_spec")
            }
            found.append((marks, layer.call.__qualname__))
        return found + [(type(v), id(getattr(v, "_storage", None)), id(v._layout)) for v in model.variables]

    mesh = unidist.Mesh({"data": 2, "model": 2})
    unidist.use("sim", devices=4)
    plain = mlp(layers.ReLU())
    before = state(plain), [keras.ops.convert_to_numpy(v) for v in plain.variables]
    assert unidist.plan(plain, mesh).predicted.count()
    assert state(plain) == before[0]
    for variable, value in zip(plain.variables, before[1], strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    losses = []
    for planned in (False, True):
        keras.utils.set_random_seed(3)
        model, x, y = fitted(mlp(layers.ReLU()), mesh)
        before_it = state(model)
        if planned:
            unidist.plan(model, mesh, batch=7)
        assert state(model) == before_it
        losses.append([float(model.train_on_batch(x, y)) for _ in range(2)])
    assert losses[0] == losses[1]


def test_a_model_that_reads_values_is_estimated() -> None:
    unidist.use("sim", devices=2)
    plan = unidist.plan(mlp(Reads()), unidist.Mesh({"model": 2}))
    assert plan.estimated.startswith("the model cannot be called without values (NotImplementedError: ")
    assert plan.show().splitlines()[-1] == f"the collectives are an estimate: {plan.estimated}"
    assert plan.predicted.count()


def test_a_mesh_of_many_devices_needs_none() -> None:
    unidist.use("sim", devices=1)
    plan = unidist.plan(mlp(layers.ReLU()), unidist.Mesh({"data": 512, "model": 4}), batch=1024)
    sums = {e.bytes for e in plan.predicted.events if e.axes == ("model",) and e.op == "all_reduce"}
    # Two rows; sums of 16 features and of 4 over 4 devices.
    assert sums == {2 * 3 * 2 * 16 * 4 // 4, 2 * 3 * 2 * 4 * 4 // 4}
