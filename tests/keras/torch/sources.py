"""One data set from every kind of source that Keras takes on torch."""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import pytest
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


def of_torch(change):
    """Batches of tensors that NumPy has no dtype or no layout for."""
    for x, y, w in generator():
        yield change(torch.tensor(x)), torch.tensor(y), torch.tensor(w)


class Opened(layers.Layer):
    """Gives sparse rows as they are in full."""

    def call(self, x):
        return x.to_dense() if x.is_sparse else x


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(BATCH)


def augmented_tf_data():
    """A layer of Keras that draws random numbers within the dataset, where TensorFlow computes it."""
    import keras
    import tensorflow as tf

    layer = keras.layers.RandomBrightness(0.5, value_range=(-9, 9), seed=3)

    def brightened(x, y, w):
        return tf.reshape(layer(tf.reshape(x, (-1, 6, 1, 1)), training=True), (-1, 6)), y, w

    return tf_data().map(brightened)


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
    "bfloat16": lambda: {"x": of_torch(lambda x: x.to(torch.bfloat16)), "shuffle": False},
    "float8": lambda: {"x": of_torch(lambda x: x.to(torch.float8_e4m3fn)), "shuffle": False},
    "sparse": lambda: {"x": of_torch(lambda x: x.relu().to_sparse()), "shuffle": False},
    "tf.data": lambda: {"x": tf_data(), "shuffle": False},
    "augmented tf.data": lambda: {"x": augmented_tf_data(), "shuffle": False},
}


def fit(name, strategy=None):
    """Losses and weights after an epoch from this source."""
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        opened = [Opened()] if name == "sparse" else []
        model = keras.Sequential([layers.Input((6,)), *opened, layers.Dense(5, activation="tanh"), layers.Dense(2)])
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


class Graphs(keras.Model):
    """Of each graph one number, from nodes and edges."""

    def __init__(self):
        super().__init__()
        self.nodes, self.normal, self.last = layers.Dense(12, "relu"), layers.BatchNormalization(), layers.Dense(1)

    def call(self, inputs, training=None):
        nodes = self.normal(self.nodes(inputs["nodes"]), training=training)
        start, end = inputs["edges"][:, 0], inputs["edges"][:, 1]
        heard = keras.ops.segment_sum(keras.ops.take(nodes, start, axis=0), end, num_segments=nodes.shape[0])
        return self.last(keras.ops.segment_sum(nodes + heard, inputs["graph"], num_segments=4))


def graphs():
    """Batches of four graphs; nodes, edges and graphs have other numbers of rows, and now and then the same."""
    draw = np.random.default_rng(0)
    for nodes, edges in ((9, 15), (7, 12), (4, 4), (11, 20)):
        x = {
            "nodes": draw.normal(size=(nodes, 5)).astype("float32"),
            "edges": draw.integers(0, nodes, size=(edges, 2)).astype("int32"),
            "graph": (np.arange(nodes) % 4).astype("int32"),
        }
        yield x, draw.normal(size=(4, 1)).astype("float32")


class OfGraphs(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.batches = list(graphs())

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, k):
        return self.batches[k]


def trained_on_graphs(strategy=None):
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = Graphs()
        model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
        model(OfGraphs()[0][0])
    history = model.fit(OfGraphs(), epochs=2, verbose=0, shuffle=False).history
    numbers = [*history["loss"], *history["mae"], *model.evaluate(OfGraphs(), verbose=0)]
    return [np.asarray(numbers), model.predict(OfGraphs(), verbose=0), *map(np.asarray, model.weights)]


def check_graphs(zero):
    """Each rank computes whole batches, and what they learn is added up as one device's."""
    import unidist

    with (
        pytest.warns(UserWarning, match=r"tensors of a batch have \[4, 9, 15\] rows") as said,
        unidist.ledger() as sent,
    ):
        found = trained_on_graphs(unidist.DataParallel(zero=zero))
    assert len([one for one in said if "tensors of a batch" in str(one.message)]) == 1
    assert any(event.purpose == "gradient" for event in sent.events)
    for one, other in zip(found, trained_on_graphs(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def check_graphs_that_are_cut(zero):
    """Each rank holds its rows of the nodes, of the edges and of the graphs."""
    import unidist

    strategy = unidist.DataParallel(zero=zero, per_tensor_rows=True)
    with warnings.catch_warnings(), unidist.ledger() as sent:
        warnings.filterwarnings("error", "tensors of a batch")
        found = trained_on_graphs(strategy)
    assert any(event.purpose == "batch statistics" for event in sent.events)
    for one, other in zip(found, trained_on_graphs(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def check_graphs_in_a_process():
    import unidist

    if unidist.process_index() == 0:
        check_graphs(3)
        check_graphs_that_are_cut(3)
        return
    for apart in (False, True):
        trained_on_graphs(unidist.DataParallel(zero=3, per_tensor_rows=apart))
        trained_on_graphs()
