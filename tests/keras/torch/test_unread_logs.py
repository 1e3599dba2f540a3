"""Logs of steps that nobody reads: none are computed, and the numbers of an epoch stay those of one device."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, namedtuple

import keras
import numpy as np
import pytest
import torch

import unidist
from tests.keras.torch.models import features, mlp
from unidist.keras.patching.compat import tree
from unidist.keras.torch.structures import of_batch


def fitted(strategy=None, callbacks=(), verbose=0, metrics=("mae",), epochs=2):
    keras.utils.set_random_seed(3)
    x, y = features(rows=8)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), loss="mse", metrics=list(metrics))
        told = {"verbose": verbose, "callbacks": list(callbacks), "validation_data": (x, y)}
        return model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, **told).history


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)


def test_an_epochs_results_are_one_devices():
    assert_same(fitted(unidist.DataParallel()), fitted())


class Counted(keras.metrics.MeanAbsoluteError):
    count = 0

    def result(self):
        Counted.count += 1
        return super().result()


def test_results_are_computed_where_they_are_read_alone():
    counts = []
    for verbose in (0, 1):
        Counted.count = 0
        fitted(unidist.DataParallel(), verbose=verbose, metrics=[Counted(name="mae")])
        counts.append(Counted.count)
    # Two epochs and the validation behind each have two steps, of four ranks, whose results a bar shows.
    assert counts[1] - counts[0] == 2 * 2 * 2 * 4


class Compiling(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.compile(keras.optimizers.SGD(0.05), loss="mse", metrics=["mse"])
            self.model.make_train_function(force=True)


def test_names_are_those_of_what_a_callback_has_compiled():
    found, wanted = (fitted(one, callbacks=[Compiling()]) for one in (unidist.DataParallel(), None))
    assert_same(found, wanted)
    assert "mse" in found


class Adding(keras.callbacks.Callback):
    """Gives the model a metric amid an epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1 and not hasattr(self.model, "late"):
            self.model.late = keras.metrics.Mean(name="late")
            self.model.late.update_state(2.0)


def test_a_metric_that_comes_amid_an_epoch_is_in_its_results():
    found, wanted = (fitted(one, callbacks=[Adding()], epochs=1) for one in (unidist.DataParallel(), None))
    assert found["late"] == wanted["late"]


def test_logs_that_somebody_reads_are_there():
    seen = []
    heard = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(sorted(logs)))
    fitted(unidist.DataParallel(), callbacks=[heard], epochs=1)
    assert seen == [["loss", "mae"]] * 2


Pair = namedtuple("Pair", "x y")
ONE, TWO = torch.ones(2), np.ones(3)
BATCHES = [
    (ONE, TWO),
    [ONE, None],
    (ONE, (TWO, [ONE])),
    ({"b": ONE, "a": TWO}, None),
    (OrderedDict(b=ONE, a=(TWO,)), ONE),
    (Pair(ONE, {"a": TWO}), None),
    (),
    ONE,
    (2.5, "text"),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_is_walked_as_keras_does(batch):
    def leaf(x):
        return ("leaf", id(x))

    found, wanted = of_batch(leaf, batch), tree.map_structure(leaf, batch)
    assert found == wanted
    assert type(found) is type(wanted)
