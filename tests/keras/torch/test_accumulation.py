"""Accumulated gradients wait on their ranks: nothing is sent until the accumulation is full, or somebody saves."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unidist
from tests.keras.torch.models import assert_equal, features, mlp, train


def strategy(zero):
    return unidist.DataParallel(zero=zero)


@pytest.mark.parametrize("zero", [0, 1])
def test_steps_of_an_accumulation_send_no_gradients(zero):
    x, y = features(rows=24)

    def optimizer():
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)

    strategy = unidist.DataParallel(zero=zero)
    wanted = train(mlp, x, y, optimizer=optimizer)
    with unidist.ledger() as book:
        assert_equal(train(mlp, x, y, strategy, optimizer=optimizer), wanted)
    assert book.count(purpose="gradient") == 4  # of 12 steps


def test_what_waits_in_an_accumulation_is_saved(tmp_path):
    """Two epochs of two steps, three steps a full accumulation: the file has what one device's has."""
    x, y = features(rows=8)

    def run(strategy, name):
        found = train(
            mlp,
            x,
            y,
            strategy,
            epochs=1,
            optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
        )
        found.model.save(tmp_path / name)
        model = keras.saving.load_model(tmp_path / name)
        return [np.asarray(v) for v in model.optimizer.variables]

    wanted = run(None, "one.keras")
    assert max(np.abs(v).max() for v in wanted[2:]) > 0
    for zero in (0, 1, 3):
        for a, b in zip(run(unidist.DataParallel(zero=zero), f"{zero}.keras"), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


class Saving(keras.callbacks.Callback):
    """Saves behind every step, and reads the optimizer's variables back."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        path = self.folder / f"{len(self.found)}.keras"
        self.model.save(path)
        self.found.append([np.asarray(v) for v in keras.saving.load_model(path).optimizer.variables])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_waits_is_saved_within_an_epoch_and_counts_once(zero, tmp_path):
    """Each file has what one device's has, and saving changes nothing in what follows."""
    x, y = features(rows=16)

    def run(given, name):
        saving = Saving(tmp_path / name)
        saving.folder.mkdir()
        trained = train(
            mlp,
            x,
            y,
            given,
            epochs=1,
            optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
            callbacks_too=[saving],
        )
        return trained, saving.found

    found, files = run(strategy(zero), "many")
    wanted, expected = run(None, "one")
    assert_equal(found, wanted)
    assert len(files) == len(expected) == 4
    for own, others in zip(files, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("frequency", [None, 3])
def test_averages_of_weights_go_on_within_an_accumulation(zero, frequency):
    """Keras averages in every step, and overwrites in each step of every so many accumulations."""
    x, y = features(rows=24)

    def optimizer():
        return keras.optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency, gradient_accumulation_steps=2
        )

    found, wanted = (train(mlp, x, y, given, epochs=1, optimizer=optimizer) for given in (strategy(zero), None))
    assert_equal(found, wanted)
    for a, b in zip(found.model.optimizer.variables, wanted.model.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6, err_msg=a.path)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_constraints_hold_within_an_accumulation(zero):
    """Keras constrains in every step: what initial values break counts from the second on."""
    x, y = features()

    def build():
        kernel = layers.Dense(8, name="a", kernel_constraint="non_neg")
        return keras.Sequential([layers.Input((12,)), kernel, layers.Dense(3, name="c")])

    def optimizer():
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)

    assert_equal(train(build, x, y, strategy(zero), optimizer=optimizer), train(build, x, y, optimizer=optimizer))
