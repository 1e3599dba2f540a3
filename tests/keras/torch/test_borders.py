"""Borders between native rows and what carries the layout of all rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import unidist
from tests.keras.torch.models import assert_equal, features, train


class Ranked(layers.Layer):
    """Sorts each feature over the rows of a batch: each device has all of them."""

    def call(self, x):
        return ops.sort(x, axis=0)


class Centred(layers.Layer):
    """Looks at several rows."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(6, "tanh")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x - ops.mean(x, axis=0))


def compare(build, x, y, mesh=None, **options):
    with unidist.ledger() as sent:
        found = train(build, x, y, unidist.DataParallel(mesh=mesh), **options)
    assert_equal(found, train(build, x, y, **options))
    assert sent.events


def test_a_layer_is_given_rows_beside_those_of_all():
    """Added up natively, a shard's rows would meet all rows."""

    def build():
        x = keras.Input((12,))
        h = layers.Dense(6, "tanh")(x)
        return keras.Model(x, layers.Dense(3)(layers.Add()([h, Ranked()(h)])))

    compare(build, *features(14))


@pytest.mark.parametrize("rows", [5, 9, 10])
def test_rows_that_do_not_divide_over_two_data_axes(rows):
    """Whoever cuts a batch and whoever looks at all of its rows go by one rule."""

    def build():
        return keras.Sequential([layers.Dense(6, "tanh"), Ranked(), layers.Dense(3)])

    compare(build, *features(rows), mesh=unidist.Mesh({"host": 2, "device": 2}), batch_size=rows)


class Branched(keras.Model):
    """A product takes what has a mask before the layer does that needs the mask."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 4, mask_zero=True)
        self.product, self.memory, self.out = layers.Dense(4, "tanh"), layers.GRU(3), layers.Dense(3)

    def call(self, x):
        h = self.table(x)
        return self.out(ops.mean(self.product(h), axis=1)) + self.memory(h)


def test_a_layer_that_needs_no_mask_leaves_it_to_others():
    x = np.random.default_rng(0).integers(0, 4, (14, 5))
    compare(Branched, x, features(14)[1])


@pytest.mark.parametrize("mode", ["full", "activations"])
def test_what_looks_at_several_rows_is_computed_again(mode):
    def build():
        with keras.RematScope(mode=mode):
            inner = [layers.Dense(8, "tanh"), Centred(), layers.Dense(3)]
        return keras.Sequential([keras.Input((12,)), *inner])

    compare(build, *features(14))


LOSSES = {
    name: kind
    for name, kind in sorted(vars(keras.losses).items())
    if isinstance(kind, type) and issubclass(kind, keras.losses.Loss) and name not in ("Loss", "CTC")
}
METRICS = ("accuracy", "auc", "precision", "f1_score", "top_k_categorical_accuracy")


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_keras_send_no_rows(name: str) -> None:
    rng = np.random.default_rng(0)
    numbers = name.startswith("Sparse") or name in ("Circle", "CategoricalGeneralizedCrossEntropy")
    y = rng.integers(0, 4, 22) if numbers else np.eye(4)[rng.integers(0, 4, 22)]
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "softmax")])
        model.compile("sgd", LOSSES[name]())
    with unidist.ledger() as book:
        model.fit(rng.uniform(size=(22, 5)), y, batch_size=8, verbose=0)
    assert "gathered" not in str(unidist.describe(model).why)
    # A hinge asks whether all targets are 0 or 1: a number. Three look at all rows.
    sent = sum(event.bytes for event in book.events if event.purpose == "losses")
    assert sent <= 64 or name in ("Circle", "Dice", "Tversky")


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_keras_send_no_rows(name: str) -> None:
    rng = np.random.default_rng(0)
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "softmax")])
        model.compile("sgd", "mse", metrics=[name])
    model.fit(rng.uniform(size=(22, 5)), np.eye(6)[rng.integers(0, 6, 22)], batch_size=8, verbose=0)
    assert "gathered" not in str(unidist.describe(model).why)
