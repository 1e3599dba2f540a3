"""Models and losses that look at several rows of a batch, in the spirit of contrastive learning, collaborative
filtering, mixtures of experts and the like; and what the processes of their tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, made_ready, scope, strategy, told

ROWS, BATCH, WIDTH = 22, 8, 8  # three batches, the last of six rows: on four shards two, two, two and none
RULES: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*z/kernel": ("model", None)}
TABLES: dict[str, tuple[str | None, ...]] = {".*user/embeddings": (None, "model"), ".*bias/embeddings": ("model", None)}


# losses ---------------------------------------------------------------------------------------------------------------


def contrastive(y: Any, p: Any) -> Any:
    """Each row's similarity to all others: the row itself is the right answer."""
    p = ops.normalize(p, axis=-1)
    likeness = ops.matmul(p, ops.transpose(p)) * 3
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(p)[0]), likeness, from_logits=True)


class Supervised(keras.losses.Loss):
    """Rows of one class are to be alike: one number for the batch."""

    def call(self, y: Any, p: Any) -> Any:
        likeness = ops.matmul(p, ops.transpose(p))
        same = ops.cast(ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1))), p.dtype)
        return ops.mean(ops.logsumexp(likeness, axis=1)) - ops.sum(likeness * same) / ops.sum(same)


def total(y: Any, p: Any) -> Any:
    return 0.01 * ops.sum(ops.square(ops.cast(ops.reshape(y, (-1, 1)), "float32") - p))


def masked_mean(y: Any, p: Any) -> Any:
    each, counts = ops.mean(ops.square(p), axis=-1), ops.cast(y > 0, "float32")
    return ops.sum(each * counts) / ops.sum(counts)


def centred(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(p - ops.mean(p, axis=0)), axis=-1)


def dice(y: Any, p: Any) -> Any:
    return keras.losses.dice(ops.one_hot(y, 4), ops.sigmoid(p))


def alone(y: Any, p: Any) -> Any:
    """A loss of one's own that treats each row alone."""
    return ops.mean(ops.square(p[:, :2] - 1.0), axis=-1)


# layers ---------------------------------------------------------------------------------------------------------------


class Center(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


class Ranked(layers.Layer):
    """Sorts the rows, and one row less than there are."""

    def call(self, x: Any) -> Any:
        steps = ops.sort(ops.diff(x, axis=0), axis=0)
        return x - ops.quantile(x, 0.3, axis=0) + 0.1 * ops.sort(x, axis=0) + ops.mean(steps[:2], axis=0)


class Sorted(layers.Layer):
    def call(self, x: Any) -> Any:
        return ops.sort(x, axis=0)


class Ordered(layers.Layer):
    """Treats each row alone, but all its features together: sorted, and as waves."""

    def call(self, x: Any) -> Any:
        real, imaginary = ops.fft((x, ops.zeros_like(x)))
        return ops.sort(x, axis=-1) + 0.1 * real * imaginary


class Neighbour(layers.Layer):
    """A layer inside is called with rows in another order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = layers.Dense(WIDTH, name="inner")

    def call(self, x: Any) -> Any:
        return self.inner(ops.flip(x, 0)) + x


class Experts(layers.Layer):
    """Its added loss is a product of two means over the rows."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(shape[-1], 4), name="gate")
        self.experts = self.add_weight(shape=(4, shape[-1], shape[-1]), name="experts")

    def call(self, x: Any) -> Any:
        chosen = ops.softmax(ops.matmul(x, self.gate))
        often = ops.mean(ops.one_hot(ops.argmax(chosen, axis=-1), 4), axis=0)
        self.add_loss(4 * ops.sum(ops.mean(chosen, axis=0) * often))
        return ops.einsum("bf,efo,be->bo", x, self.experts, chosen)


class Scaled(layers.Layer):
    """Treats each row alone, though it is not Keras's."""

    def call(self, x: Any) -> Any:
        return ops.reshape(ops.reshape(x, (-1, 2, WIDTH // 2)) * 0.5, (-1, WIDTH))


class Summing(layers.Layer):
    """Rows that come behind one do not reach it, however many they are."""

    def call(self, x: Any) -> Any:
        return x + 0.1 * ops.cumsum(x, axis=0)


class Counting(layers.Layer):
    """Treats each row alone, but for how many there are."""

    def call(self, x: Any) -> Any:
        return x * ops.cast(ops.shape(x)[0], x.dtype) / BATCH


class Deciding(layers.Layer):
    """All rows together decide what becomes of each."""

    def call(self, x: Any) -> Any:
        return ops.where(ops.sum(x) > 0, x, 0.5 * x)


class Measuring(layers.Layer):
    """Keeps numbers of the rows that its result does not have."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.size, self.rows = keras.metrics.Mean(name="size"), keras.metrics.Sum(name="rows")

    def build(self, shape: Any) -> None:
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")

    def call(self, x: Any) -> Any:
        self.size.update_state(ops.mean(ops.abs(x)))
        self.rows.update_state(ops.ones_like(x[:, 0]))
        self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        return x


class Sampling(layers.Layer):
    """Noise for each row, as of a variational autoencoder."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x: Any) -> Any:
        return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seeds)


def _stack(*middle: Callable[[], Any]) -> Any:
    first = [layers.Input((6,)), layers.Dense(WIDTH, "tanh", name="a")]
    return keras.Sequential([*first, *(make() for make in middle), layers.Dense(4, name="z")], name="stack")


def _centred_by_operations() -> Any:
    """As wide as a batch has rows: the means have one number for each feature, and not for each row."""
    inputs = layers.Input((6,))
    x = layers.Dense(BATCH, "tanh", name="a")(inputs)
    means = layers.Dense(BATCH, name="m")(ops.expand_dims(ops.mean(x, axis=0), 0))
    return keras.Model(inputs, layers.Dense(4, name="z")(x - means), name="centred")


def _of_a_batch() -> Any:
    """Built by its first batch, for that number of rows: Keras makes a graph of it then, with the mask's operation."""
    words = [layers.Embedding(16, 6, mask_zero=True, name="words"), layers.GRU(6, name="gru")]
    return keras.Sequential(
        [*words, layers.Dense(WIDTH, name="a"), Sorted(name="sorted"), layers.Dense(4, name="z")], name="stack"
    )


def center(x: Any) -> Any:
    """An activation of all rows."""
    return x - ops.mean(x, axis=0, keepdims=True)


def sparse(x: Any) -> Any:
    """A penalty on the mean activation of the batch, as of a sparse autoencoder."""
    often = ops.mean(ops.sigmoid(x), axis=0)
    return -ops.sum(ops.log(often) + ops.log(1.0 - often))


class Scale(layers.Layer):
    """Keras cannot know what it gives before it is called: what comes behind it is built by the first batch."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x: Any) -> Any:
        return center(x) * self.factor


class Deviation(layers.BatchNormalization):
    """Keras's but for a method that its call uses: another measure of how the batch spreads."""

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean = ops.mean(inputs, axis=0)
        return mean, 1.0 + ops.mean(ops.abs(inputs - mean), axis=0)


def _of_functions() -> list[Callable[[], Any]]:
    """Layers of Keras's that call a function of the user's own."""
    return [
        lambda: layers.Dense(WIDTH, activation=center, name="dense"),
        lambda: layers.Dense(WIDTH, activation=ops.square, name="square"),
        lambda: layers.Reshape((2, WIDTH // 2)),
        lambda: layers.LSTM(WIDTH, activation=center, name="lstm"),
    ]


def _in_time() -> list[Callable[[], Any]]:
    return [
        lambda: layers.Reshape((2, WIDTH // 2)),
        lambda: layers.TimeDistributed(Scale(name="scale"), name="time"),
        lambda: layers.Flatten(),
    ]


def _in_pairs() -> Any:
    """Each two rows are centred: what an operation gives has half as many."""
    inputs = layers.Input((6,))
    x = layers.Dense(WIDTH, "tanh", name="a")(inputs)
    pairs = ops.reshape(x, (-1, 2, WIDTH))
    centred = ops.reshape(pairs - ops.mean(pairs, axis=1, keepdims=True), (-1, WIDTH))
    return keras.Model(inputs, layers.Dense(4, name="z")(x + centred), name="pairs")


def _of_one_sequence() -> Any:
    """The rows are a dim of their own for a while, as for an attention of rows to rows."""
    inputs = layers.Input((6,))
    x = ops.expand_dims(layers.Dense(WIDTH, "tanh", name="a")(inputs), 0)
    centred = ops.squeeze(x - ops.mean(x, axis=1, keepdims=True), 0)
    return keras.Model(inputs, layers.Dense(4, name="z")(centred), name="sequence")


def _filtering() -> Any:
    """keras.io's collaborative filtering multiplies all users' vectors with all films'."""
    ids = layers.Input((2,), dtype="int32")
    user = layers.Embedding(16, 4, name="user")(ids[:, 0])
    film = layers.Embedding(16, 4, name="film")(ids[:, 1])
    bias = layers.Embedding(16, 4, name="bias")(ids[:, 0])
    return keras.Model(ids, ops.sigmoid(ops.tensordot(user, film, 2) * 10 + bias), name="filtering")


class Own(keras.Model):
    """A model whose call mixes rows, with batch statistics and a layer that mixes them too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.a = layers.Dense(WIDTH, "tanh", name="a")
        self.norm = layers.BatchNormalization(epsilon=0.1, name="norm")
        self.center = Center(name="center")
        self.z = layers.Dense(4, name="z")

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.norm(self.a(x), training=training)
        return self.z(self.center(x) + ops.max(x, axis=0))


class Attending(keras.Model):
    """Attention reads its mask off what it is given, and takes it off: what comes behind it counts all words."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.words = layers.Embedding(16, 6, mask_zero=True, name="words")
        self.attention = layers.MultiHeadAttention(2, 3, name="attention")
        self.pool = layers.GlobalAveragePooling1D()
        self.a = layers.Dense(WIDTH, "tanh", name="a")
        self.z = layers.Dense(4, name="z")

    def call(self, x: Any) -> Any:
        words = self.words(x)
        attended = self.attention(words, words)
        return self.z(self.a(self.pool(attended) + self.pool(attended + words) + self.pool(words)))


# name -> (model, loss, what is given the rows of all shards)
CASES: dict[str, tuple[Callable[[], Any], Any, set[str]]] = {
    "contrastive": (_stack, contrastive, {"loss contrastive"}),
    "supervised": (_stack, Supervised, {"loss supervised"}),
    "total": (_stack, total, {"loss total"}),
    "masked mean": (_stack, masked_mean, {"loss masked_mean"}),
    "centred": (_stack, centred, {"loss centred"}),
    "dice": (_stack, dice, {"loss dice"}),
    "Keras's own": (lambda: _stack(lambda: layers.Activation("sigmoid")), keras.losses.Circle, {"loss circle"}),
    "alone": (lambda: _stack(Scaled), alone, set()),
    "sampling": (lambda: _stack(Sampling), alone, {"stack/sampling"}),
    "center": (lambda: _stack(Center), alone, {"stack/center"}),
    "ranked": (lambda: _stack(Ranked), alone, {"stack/ranked"}),
    "ordered": (lambda: _stack(Ordered), alone, set()),
    "neighbour": (lambda: _stack(Neighbour), alone, {"stack/neighbour"}),
    "experts": (lambda: _stack(Experts), alone, {"stack/experts"}),
    "summing": (lambda: _stack(Summing), alone, {"stack/summing"}),
    "counting": (lambda: _stack(Counting), alone, {"stack/counting"}),
    "deciding": (lambda: _stack(Deciding), alone, {"stack/deciding"}),
    "measuring": (lambda: _stack(Measuring), alone, {"stack/measuring"}),
    "batch": (_of_a_batch, alone, {"stack/sorted"}),
    "operations": (_centred_by_operations, alone, {"mean"}),
    "filtering": (_filtering, alone, {"tensordot"}),
    "penalty": (
        lambda: _stack(lambda: layers.Dense(WIDTH, activity_regularizer=sparse, name="dense")),
        alone,
        {"activity regularizer of stack/dense"},
    ),
    "functions": (lambda: _stack(*_of_functions()), alone, {"stack/dense", "stack/lstm"}),
    "time": (lambda: _stack(*_in_time()), alone, {"stack/time/scale"}),
    "pairs": (_in_pairs, alone, {"reshape"}),
    "sequence": (_of_one_sequence, alone, set()),
    "helper": (lambda: _stack(lambda: Deviation(name="deviation")), alone, {"stack/deviation"}),
    "attending": (Attending, alone, set()),
    "own": (Own, contrastive, {"own", "own/center", "loss contrastive"}),
}


def spread(y: Any, p: Any) -> Any:
    """A metric of all rows at once."""
    return ops.max(p) - ops.mean(p)


def data(name: str, rows: int = ROWS) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 6)).astype("float32")
    if name == "filtering":
        x = rng.integers(0, 16, (rows, 2)).astype("int32")
    if name in ("batch", "attending"):
        x = rng.integers(0, 4, (rows, 6)).astype("int32")
    return x, (np.arange(rows) % 4).astype("int32"), rng.uniform(0.1, 3.0, rows).astype("float32")


def mixed(kind: str | None, zero: int, name: str, weighted: bool, rows: int = ROWS) -> Result:
    """Trains, evaluates and predicts; `kind`: None for one device."""
    fresh()
    build, loss, _ = CASES[name]
    x, y, weights = data(name, rows)
    rules = TABLES if name == "filtering" else RULES
    with scope(None if kind is None else strategy(kind, rules, zero=zero)), unidist.ledger() as book:
        model = build()
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), loss() if isinstance(loss, type) else loss, metrics=[spread]
        )
        made_ready(model)
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, sample_weight=weights if weighted else None
        ).history
    return {
        "history": history,
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "_mixing": {event.purpose[8:] for event in book.events if event.purpose.startswith("rows of ")},
        "_why": {} if kind is None else dict(unidist.describe(model).why),
        **told(model),
    }


def table_beside(kind: str | None, zero: int) -> Result:
    """A table that a graph gives to a layer, with as many rows as a shard of the batch."""

    class Nearest(layers.Layer):
        def call(self, x: Any, table: Any) -> Any:
            return x + ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(table))), table)

    fresh()
    table = ops.convert_to_tensor(np.random.default_rng(4).normal(size=(2, WIDTH)).astype("float32"))
    x, y, _ = data("")
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        inputs = layers.Input((6,))
        near = Nearest(name="near")(layers.Dense(WIDTH, name="a")(inputs), table=table)
        model = keras.Model(inputs, layers.Dense(4, name="z")(near), name="table")
        model.compile(keras.optimizers.SGD(0.1), alone)
        history = model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


class Centred(keras.Model):
    """Its own call looks at several rows, and no layer of it."""

    def __init__(self) -> None:
        super().__init__(name="centred")
        self.a, self.b = layers.Dense(WIDTH, "tanh"), layers.Dense(4)

    def call(self, x: Any) -> Any:
        h = self.a(x)
        return self.b(h - ops.mean(h, axis=0))


def centred_by_its_call(kind: str | None, zero: int) -> Result:
    """No layer of the model looks at several rows, but its own call does."""
    fresh()
    x, _, _ = data("")
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        model = Centred()
        model(x[:2])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, x[:, :4], batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


def mixing_of(name: str) -> set[str]:
    return CASES[name][2]
