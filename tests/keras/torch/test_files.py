"""A file of a model is whole or not there: what could not be written leaves the one before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.saving.saving_lib import H5IOStore

import unidist
from unidist.flight.reading import parse
from unidist.flight.recorder import recorder


def net():
    keras.utils.set_random_seed(1)
    return keras.Sequential([layers.Input((4,)), layers.Dense(3, name="a"), layers.Dense(2, name="b")])


def save(model, path):
    if path.name.endswith(".weights.h5"):
        model.save_weights(path)
    else:
        model.save(path)


def full_after(values, original):
    left = [values]

    def set_item(self, key, value):
        if not left[0]:
            raise OSError("no space is left")
        left[0] -= 1
        original(self, key, value)

    return set_item


@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_a_disk_that_is_full_leaves_the_last_file(name, is_placed, tmp_path, monkeypatch):
    if is_placed:
        with unidist.DataParallel().scope():
            model = net()
    else:
        model = net()
    save(model, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    monkeypatch.setattr(H5IOStore, "__setitem__", full_after(2, H5IOStore.__setitem__))
    with pytest.raises(OSError, match="no space is left"):
        save(model, tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_keras_s_checkpoints_take_is_saving(weights_only, tmp_path):
    with unidist.DataParallel().scope():
        model = net()
    model.compile("sgd", "mse")
    name = "{epoch}.weights.h5" if weights_only else "{epoch}.keras"
    callback = keras.callbacks.ModelCheckpoint(tmp_path / name, save_weights_only=weights_only)
    before = parse(bytes(recorder)).seconds["saving"]
    begun = time.monotonic()
    model.fit(np.ones((8, 4)), np.ones((8, 2)), epochs=2, verbose=0, callbacks=[callback])
    assert len(list(tmp_path.iterdir())) == 2
    # Two files of some kB are written and brought to the disk.
    assert 0.001 < parse(bytes(recorder)).seconds["saving"] - before < time.monotonic() - begun


def test_a_process_that_is_killed_leaves_the_last_file(tmp_path):
    """In the middle of writing, and what it leaves is written over."""
    path = tmp_path / "m.weights.h5"
    with unidist.DataParallel().scope():
        model = net()
    model.save_weights(path)
    before = path.read_bytes()
    code = f"""
import os, signal
import unidist
unidist.use("sim", devices=2)
import keras
from keras.src.saving.saving_lib import H5IOStore
with unidist.DataParallel().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
H5IOStore.__setitem__ = lambda self, key, value: os.kill(os.getpid(), signal.SIGKILL)
model.save_weights({str(path)!r})
"""
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False, env=env).returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    model.save_weights(path)
    assert sorted(os.listdir(tmp_path)) == ["m.weights.h5"]


def test_the_legacy_format_is_replaced_too(tmp_path):
    with unidist.DataParallel().scope():
        model = net()
    path = tmp_path / "m.h5"
    for _ in range(2):
        model.save(path)
    loaded = keras.models.load_model(path, compile=False)
    for a, b in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert os.listdir(tmp_path) == ["m.h5"]
