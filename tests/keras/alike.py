"""What must be seen with all rows, or by all ranks alike: losses that need more rows than one process has, and tables
that every rank looks up by the same ids."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.keras.mixing import BATCH, WIDTH, data
from tests.support.runs import Result, fresh, made_ready, scope, strategy, told

WORDS, LENGTH, CLASSES = 11, 5, 4


def classes(y: Any) -> Any:
    return ops.cast(ops.reshape(y, (-1,)), "int32")


def hardest(y: Any, p: Any) -> Any:
    """Of the rows with the largest errors: more than a shard of two has."""
    losses = ops.mean(ops.square(p - ops.one_hot(classes(y), CLASSES)), axis=-1)
    return ops.mean(ops.top_k(losses, BATCH - 2)[0])


def mined(kind: str | None, zero: int) -> Result:
    fresh()
    x, y, _ = data("")
    with scope(None if kind is None else strategy(kind, {}, zero=zero)):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(WIDTH, "tanh"), layers.Dense(CLASSES)], name="mined")
        model.compile(keras.optimizers.SGD(0.1), hardest, metrics=[hardest])
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


class Positions(layers.Layer):
    """keras.io's embedding of tokens and positions, and one that stands before each row."""

    def build(self, shape: Any) -> None:
        self.words = layers.Embedding(WORDS, WIDTH, name="words")
        self.places = layers.Embedding(2 * LENGTH, WIDTH, name="places")
        self.first = layers.Embedding(2, WIDTH, name="first")
        for table in (self.words, self.places, self.first):
            table.build(shape)

    def call(self, ids: Any) -> Any:
        rows, length = ops.shape(ids)[0], ops.shape(ids)[1]
        placed = self.words(ids) + self.places(ops.arange(length))
        return ops.concatenate([self.first(ops.zeros((rows, 1), "int32")), placed], axis=1)


class Prompt(layers.Layer):
    """Learned rows of a table, the same for all rows of the batch, and some twice."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(6, shape[-1]), initializer="glorot_uniform", name="table")

    def call(self, x: Any) -> Any:
        learned = ops.take(self.table, np.array([0, 2, 2, 5], np.int64), axis=0)
        return x + ops.mean(learned, axis=0)


class Proxies(keras.Model):
    """Its loss looks up a row for each class."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(CLASSES, WIDTH), initializer="glorot_uniform", name="proxies")
        super().build(shape)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        own = ops.take(self.table, classes(y), axis=0)
        return ops.mean(ops.square(y_pred - own)) + ops.sum(self.losses)


OPTIMIZERS = {
    # With Keras's epsilon of 1e-7 Adam turns rounding noise of gradients that are nearly zero into whole steps.
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
MIDDLE: dict[str, list[Any]] = {"positions": [], "prompt": [Prompt]}


def _of_some_lengths() -> list[Any]:
    """Batches of ids whose length a program does not know."""
    _, y, _ = data("")
    ids = np.random.default_rng(2).integers(0, WORDS, (len(y), LENGTH)).astype("int32")
    return [(ids[k : k + BATCH, : LENGTH - k // BATCH], y[k : k + BATCH]) for k in range(0, len(y), BATCH)] * 2


def looked_up(kind: str | None, zero: int, name: str, optimizer: str, eagerly: bool) -> Result:
    """Trains with an optimizer that divides by what it knows of each row; `name`: of MIDDLE, or "proxies"."""
    fresh()
    batches = _of_some_lengths()
    with scope(None if kind is None else strategy(kind, {}, zero=zero)):
        inputs = layers.Input((None,), dtype="int32")
        x = layers.GlobalAveragePooling1D(name="pool")(Positions(name="positions")(inputs))
        for made in MIDDLE.get(name, []):
            x = made(name="middle")(x)
        x = layers.Dense(WIDTH if name == "proxies" else CLASSES, name="out")(x)
        model = (Proxies if name == "proxies" else keras.Model)(inputs, x, name="net")
        loss = None if name == "proxies" else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss, run_eagerly=eagerly)
        history = made_ready(model).fit((batch for batch in batches), steps_per_epoch=len(batches), verbose=0).history
    return {"history": history, **told(model)}


def ended(kind: str | None, zero: int) -> Result:
    """A generator that ends by itself. (Keras on TensorFlow alone counts one step more then, of nothing.)"""
    fresh()
    batches = [(x, x[:, :1]) for x in np.split(data("", 24)[0], 3)]
    with scope(None if kind is None else strategy(kind, {}, zero=zero)):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)], name="ended")
        model.compile("sgd", "mse")
        history = model.fit((batch for batch in batches), verbose=0).history
        found = model.evaluate((batch for batch in batches), verbose=0)
        outputs = model.predict(((x,) for x, _ in batches), verbose=0)
    return {"history": history, "loss": found, "outputs": outputs, "weights": told(model)["weights"]}


class Nodes(keras.Model):
    """A graph whose nodes and edges the model keeps as tensors, as keras.io's of citations: a batch names nodes."""

    def __init__(self) -> None:
        super().__init__(name="nodes")
        draw = np.random.default_rng(3)
        self.nodes = ops.convert_to_tensor(draw.normal(size=(30, 6)).astype("float32"))
        self.edges = ops.convert_to_tensor(draw.integers(0, 30, (2, 60)).astype("int32"))
        self.before = layers.Dense(WIDTH, "relu", name="before")
        self.out = layers.Dense(CLASSES, name="out")

    def call(self, ids: Any) -> Any:
        x = self.before(self.nodes)
        near = ops.segment_sum(ops.take(x, self.edges[1], axis=0), self.edges[0], num_segments=30)
        return self.out(ops.take(x + near, ids, axis=0))


def kept(kind: str | None, zero: int) -> Result:
    """What the model keeps is what it was, behind a training too."""
    fresh()
    _, y, _ = data("")
    ids = np.arange(len(y)).astype("int32")
    with scope(None if kind is None else strategy(kind, {}, zero=zero)):
        model = Nodes()
        model(ids[:2])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        nodes = model.nodes
        history = model.fit(ids, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        loss = model.evaluate(ids, y, batch_size=BATCH, verbose=0)
    assert model.nodes is nodes
    return {"history": history, "loss": loss, **told(model)}


def adapted(kind: str | None, zero: int, eagerly: bool) -> Result:
    """A layer of Keras's that keeps tensors, in steps and in a call of the model itself."""
    fresh()
    x, _, _ = data("")
    means = layers.Normalization(name="means")
    means.adapt(x)
    with scope(None if kind is None else strategy(kind, {}, zero=zero)):
        model = keras.Sequential([keras.Input((6,)), means, layers.Dense(2, name="out")], name="adapted")
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        history = model.fit(x, x[:, :2], batch_size=BATCH, shuffle=False, verbose=0).history
        outputs = ops.convert_to_numpy(model(x[:BATCH]))
    return {"history": history, "outputs": outputs, **told(model)}
