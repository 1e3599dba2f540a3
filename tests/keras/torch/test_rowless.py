"""Ranks without rows, and what of Keras's own looks at several rows."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_hub.layers import FNetEncoder

import unidist
from tests.keras.torch.models import assert_equal, train
from tests.support.sampling import unless_all
from unidist.keras.layer_facts import is_known

RNG = np.random.default_rng(0)
# 4 and 1: three of four devices have no rows at the end.
IMAGES = RNG.random((5, 8, 8, 3)).astype("float32")
CLASSES = np.eye(4, dtype="float32")[RNG.integers(0, 4, 5)]
VECTORS = RNG.normal(size=(9, 6)).astype("float32")

PREPARING = {
    "resized": lambda: layers.Resizing(6, 6),
    "resized inside": lambda: keras.Sequential([layers.Conv2D(3, 1), layers.Resizing(6, 6)]),
    "cropped": lambda: layers.CenterCrop(6, 6),
    "stretched": lambda: layers.AutoContrast(value_range=(0.0, 1.0)),
    "turned": lambda: layers.RandomRotation(0.0),
    "waved": lambda: layers.RandomElasticTransform(factor=0.0, value_range=(0.0, 1.0)),
    "equalized": lambda: layers.Equalization(value_range=(0.0, 1.0)),
}
MIXING = {
    "mixed up": lambda: layers.MixUp(seed=3),
    "cut and mixed": lambda: layers.CutMix(seed=3),
}


def images(prepare):
    return keras.Sequential(
        [layers.Input((8, 8, 3)), prepare(), layers.Conv2D(4, 3), layers.GlobalMaxPooling2D(), layers.Dense(4)]
    )


# Each at one of both.
PREPARED = [(name, (3, 0)[k % 2]) for k, name in enumerate(PREPARING)]


@pytest.mark.parametrize(("name", "zero"), unless_all(PREPARED, list(itertools.product(PREPARING, (0, 3)))))
def test_ranks_without_rows_prepare_and_pool_none(name, zero):
    compiled = {"loss": "categorical_hinge", "metrics": [keras.metrics.F1Score()]}
    found, wanted = (
        train(lambda: images(PREPARING[name]), IMAGES, CLASSES, strategy, compiled=compiled)
        for strategy in (unidist.DataParallel(zero=zero), None)
    )
    assert_equal(found, wanted)
    np.testing.assert_allclose(*(one.model.predict(IMAGES, verbose=0) for one in (found, wanted)), atol=1e-5)


class Filtering(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, 4, 1), name="kernel")

    def call(self, x):
        return ops.conv(x - ops.mean(x, axis=0), self.kernel, padding="same", data_format="channels_last")


@pytest.mark.parametrize("last", [lambda: layers.Conv2D(1, 3), Filtering])
def test_one_row_has_the_gradient_of_a_single_filter(last):
    def build():
        return keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(4, 3), last(), layers.GlobalMaxPooling2D()])

    labels = CLASSES[:, :1]
    found, wanted = (train(build, IMAGES, labels, one, batch_size=5) for one in (unidist.DataParallel(), None))
    assert_equal(found, wanted)


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_without_sequences_lose_none(zero):
    def build():
        return keras.Sequential([layers.Input((6,)), layers.RepeatVector(5), layers.LSTM(4, return_sequences=True)])

    words, compiled = RNG.integers(1, 4, (9, 2)), {"loss": keras.losses.CTC()}
    found, wanted = (
        train(build, VECTORS, words, strategy, compiled=compiled)
        for strategy in (unidist.DataParallel(zero=zero), None)
    )
    assert_equal(found, wanted)


def test_extremes_of_nothing_are_refused_as_before():
    for axis in (None, 0, (0, 1)):
        with pytest.raises(ValueError, match="empty"):
            ops.max(np.zeros((0, 3), "float32"), axis=axis)


@pytest.mark.parametrize("name", MIXING)
def test_images_are_mixed_with_those_of_all_shards(name):
    assert not is_known(MIXING[name]())
    found, wanted = (
        train(lambda: images(MIXING[name]), IMAGES, CLASSES, strategy) for strategy in (unidist.DataParallel(), None)
    )
    assert_equal(found, wanted)


def likenesses():
    from keras_hub.src.models.clip.clip_layers import CLIPHead

    one, other = layers.Input((6,)), layers.Input((6,))
    return keras.Model([one, other], list(CLIPHead(name="head")(layers.Dense(5)(one), layers.Dense(5)(other))))


def of_all(y, p):
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(p)[0]), p, from_logits=True)


SIGNALS = {
    "mixed by frequency": lambda: FNetEncoder(8, dropout=0.0),
    "seen by frequency": lambda: layers.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8, mode="real"),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", SIGNALS)
def test_ranks_without_signals_transform_none(name, zero):
    def build():
        shape = (12, 6) if name == "mixed by frequency" else (72, 1)
        first = [layers.Input((6,)), layers.Dense(72), layers.Reshape(shape)]
        return keras.Sequential(
            [*first, SIGNALS[name](), layers.Flatten(), layers.LayerNormalization(), layers.Dense(2)]
        )

    y = VECTORS[:, :2]
    found, wanted = (train(build, VECTORS, y, strategy) for strategy in (unidist.DataParallel(zero=zero), None))
    assert_equal(found, wanted)


@pytest.mark.parametrize("zero", [0, 3])
def test_likenesses_of_two_towers_are_those_of_all_rows(zero):
    x, y, compiled = [VECTORS, VECTORS[::-1].copy()], [np.zeros(9), np.zeros(9)], {"loss": [of_all, of_all]}
    found, wanted = (
        train(likenesses, x, y, strategy, compiled=compiled) for strategy in (unidist.DataParallel(zero=zero), None)
    )
    assert_equal(found, wanted)
    given = [one[:8] for one in x]
    for a, b in zip(*(one.model.predict(given, batch_size=4, verbose=0) for one in (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


class Mapped(layers.Layer):
    def call(self, x):
        return ops.vectorized_map(lambda row: row * ops.tanh(ops.sum(row)), x)


def test_what_torch_transforms_is_given_whole_rows():
    def build():
        return keras.Sequential([layers.Input((6,)), layers.Dense(4), Mapped(), layers.Dense(2)])

    y = VECTORS[:, :2]
    found, wanted = (train(build, VECTORS, y, strategy) for strategy in (unidist.DataParallel(zero=1), None))
    assert_equal(found, wanted)
