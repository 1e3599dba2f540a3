"""Training on one device and under a strategy, for comparison."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from unittest import mock

import keras
import numpy as np
import torch
from keras import layers, ops

import unidist
from unidist.keras.records import model_record

TOLERANCE = 1e-5


@dataclass
class Trained:
    model: keras.Model
    losses: list[float]
    history: dict
    weights: list[np.ndarray]


class _Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(logs["loss"]))


def train(
    build, x, y, strategy=None, *, optimizer=None, batch_size=4, epochs=2, compiled=None, callbacks_too=(), **fit
) -> Trained:
    """The same seed, model and data; under a strategy or on one device."""
    keras.utils.set_random_seed(11)
    losses = _Losses()
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
        make = optimizer or (lambda: keras.optimizers.SGD(0.05, momentum=0.9))
        model.compile(optimizer=make(), **(compiled or {"loss": "mse"}))
        history = model.fit(
            x, y, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[losses, *callbacks_too], **fit
        )
    return Trained(model, losses.seen, history.history, [np.asarray(v) for v in model.weights])


def assert_equal(found: Trained, wanted: Trained, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, atol=tolerance, rtol=tolerance)
    assert found.history.keys() == wanted.history.keys()
    for name in wanted.history:
        np.testing.assert_allclose(found.history[name], wanted.history[name], atol=tolerance, rtol=tolerance)
    for a, b in zip(found.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


def features(rows=10, width=12, out=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, width)).astype("float32"), rng.normal(size=(rows, out)).astype("float32")


def mlp(middle=None, width=16):
    """Dense a (column), what stands between, Dense b (row), Dense c."""
    between = [middle()] if middle is not None else []
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(width, activation=None if middle else "relu", name="a", bias_initializer="normal"),
            *between,
            layers.Dense(8, name="b"),
            layers.Dense(3, name="c"),
        ]
    )


PAIR = {".*a/kernel": (None, "model"), ".*a/bias": ("model",), ".*b/kernel": ("model", None)}


def model_parallel(rules=None, mesh=None, **options):
    grid = mesh or unidist.Mesh({"model": 4})
    return unidist.ModelParallel(grid, unidist.LayoutMap(grid, PAIR if rules is None else rules), **options)


def two_by_two():
    return unidist.Mesh({"data": 2, "model": 2})


def rows_of(model):
    """Names of the row layers whose inputs came cut in every call."""
    return [rule.layer.name for rule in model_record.of(model).engine.rules if rule.comes_cut]


def held(variable):
    """What this process has of a variable, where its gradient comes; of one that is not distributed, all."""
    storage = getattr(variable, "_storage", None)
    return variable.value if storage is None else storage.local(None)


def compiling_by(compiler):
    """Inside torch.compile makes programs by another compiler than its own, which takes long."""
    return mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=compiler))


class OwnOfPairs(keras.Sequential):
    """A loss that compares rows with each other, and a step that hands it on as a log."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        apart = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), axis=-1)
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(apart)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        return {"loss": loss, "twice": 2.0 * loss.detach()}
