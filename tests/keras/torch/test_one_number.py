"""Losses and metrics that give one number for several rows, weighed and not, on one device and on shards."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import unidist


def rows(count):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(count, 3)).astype("float32")
    return x, (x > 0).astype("float32"), rng.uniform(0.1, 2.0, count).astype("float32")


def step(is_alone, count, weighted=True, **compiled):
    """The logs of a step on as many rows, and the weights behind it."""
    keras.utils.set_random_seed(1)
    x, y, weights = rows(count)
    with contextlib.nullcontext() if is_alone else unidist.DataParallel().scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(3, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), **compiled)
    logs = model.train_on_batch(x, y, sample_weight=weights if weighted else None, return_dict=True)
    return [*logs.values(), *model.get_weights()]


@pytest.mark.parametrize("count", [1, 3, 7, 8])  # of four shards each has a row or more, one of several, or none
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_a_loss_of_one_number_is_weighed_by_each_row(reduction, count):
    alone, found = (step(a, count, loss=losses.Dice(reduction=reduction)) for a in (True, False))
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("count", [1, 7])
def test_a_loss_that_reduces_by_itself_is_one(count):
    """Keras leaves to it what it gives: its reduction is None."""
    alone, found = (step(a, count, weighted=False, loss=losses.Dice(reduction=None)) for a in (True, False))
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def products(y, p):
    return ops.mean(ops.cast(y, p.dtype) * p, axis=-1)


class Erring(keras.metrics.Sum):
    """Counts by a loss that reduces."""

    def update_state(self, y, p, sample_weight=None):
        return super().update_state(losses.MeanSquaredError()(y, p))


METRICS = {
    "loss": losses.MeanSquaredError,
    "loss of all rows": losses.Dice,
    "Keras's of all rows": lambda: losses.tversky,
    "of each row": lambda: products,
    "own": Erring,
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_one_number_are_those_of_all_rows(name):
    """Of arrays: train_on_batch leaves what a model is compared with as it was given."""
    alone, found = (step(a, 7, weighted=False, loss="mse", metrics=[METRICS[name]()]) for a in (True, False))
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["hinge", "squared_hinge", "categorical_hinge", "kl_divergence", "poisson"])
def test_metrics_that_broadcast_labels_compare_the_rows_of_all(name):
    """Labels have one dim, predictions two, as Keras lets them."""

    def counted(is_alone):
        keras.utils.set_random_seed(1)
        x, y, _ = rows(7)
        with contextlib.nullcontext() if is_alone else unidist.DataParallel().scope():
            model = keras.Sequential([layers.Input((3,)), layers.Dense(1, "sigmoid")])
            model.compile("sgd", "mse", metrics=[name])
        return model.evaluate(x, y[:, 0], batch_size=7, verbose=0)

    np.testing.assert_allclose(counted(False), counted(True), atol=1e-5)
