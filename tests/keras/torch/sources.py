"""One data set from every kind of source that Keras takes on torch."""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import torch
from keras import layers

from tests.keras.torch.models import TOLERANCE

ROWS, BATCH = 10, 4
RNG = np.random.default_rng(4)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.normal(size=(ROWS, 2)).astype("float32")
W = np.linspace(0.5, 2, ROWS).astype("float32")


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, k):
        part = slice(k * BATCH, (k + 1) * BATCH)
        return X[part], Y[part], W[part]


class Rows(torch.utils.data.Dataset):
    """Map-style, for the default collate function; counts what it is asked for."""

    def __init__(self):
        self.asked = 0

    def __len__(self):
        return ROWS

    def __getitem__(self, k):
        self.asked += 1
        return X[k], Y[k], W[k]


def centered(rows):
    """A collate function that looks at all rows of a batch."""
    x, y, w = torch.utils.data.default_collate(rows)
    return x - x.mean(0), y, w


def loader(**options):
    return {"x": torch.utils.data.DataLoader(Rows(), BATCH, **options), "shuffle": False}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, W, strict=True))


def generator():
    for k in range(-(-ROWS // BATCH)):
        part = slice(k * BATCH, (k + 1) * BATCH)
        yield X[part], Y[part], W[part]


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(BATCH)


# name -> (arguments of fit, made anew)
SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "sample_weight": W, "batch_size": BATCH, "shuffle": False},
    "shuffled arrays": lambda: {"x": X, "y": Y, "sample_weight": W, "batch_size": BATCH, "shuffle": True},
    "tensors": lambda: {"x": torch.tensor(X), "y": torch.tensor(Y), "sample_weight": torch.tensor(W), "batch_size": 4},
    "PyDataset": lambda: {"x": Sequence(), "shuffle": True},
    "generator": lambda: {"x": generator(), "shuffle": False},
    "DataLoader": lambda: {"x": torch.utils.data.DataLoader(Rows(), batch_size=BATCH), "shuffle": False},
    "shuffling DataLoader": lambda: {"x": torch.utils.data.DataLoader(Rows(), BATCH, shuffle=True), "shuffle": False},
    "DataLoader with a generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "DataLoader with workers": lambda: loader(shuffle=True, num_workers=2),
    "DataLoader that collates": lambda: loader(collate_fn=centered),
    "iterable DataLoader": lambda: {"x": torch.utils.data.DataLoader(Stream(), batch_size=BATCH), "shuffle": False},
    "tf.data": lambda: {"x": tf_data(), "shuffle": False},
}


def fit(name, strategy=None):
    """Losses and weights after an epoch from this source."""
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse", weighted_metrics=["mae"])
        with warnings.catch_warnings():
            # Keras says so of every source whose length it cannot tell.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            history = model.fit(**SOURCES[name](), epochs=1, verbose=0)
    return [v[-1] for v in history.history.values()], [np.asarray(v) for v in model.weights]


def check(name, strategy):
    """Raises AssertionError where a strategy's training differs from one device's."""
    wanted, found = fit(name), fit(name, strategy)
    np.testing.assert_allclose(found[0], wanted[0], atol=TOLERANCE)
    for a, b in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)
