"""The models of the parity suite: each with its data, its optimizer and its rules for a "model" axis.

Everything is seeded, and every layer has a name, so that variables have the same paths wherever a model is built.
Keras is imported only when a case is built: the tests choose its backend by process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One model to be trained everywhere.

    Attributes:
        build: makes the model, without compiling it.
        data: makes the keyword arguments of `fit`: x, y, sample_weight, class_weight...
        batch: rows of a batch. Most cases end each epoch with a smaller one.
        rules: pattern of a variable's path -> axes of its dims, for a mesh that has an axis "model".
        late: it is built by fit itself, not before.
        compile: further arguments of `compile`.
    """

    name: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    optimizer: str
    rules: Mapping[str, tuple[str | None, ...]]
    batch: int
    epochs: int = 2
    shuffle: bool = False
    late: bool = False
    compile: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.steps_that_divide(1)

    def steps_that_divide(self, shards: int) -> int:
        """Those whose rows divide into as many shards."""
        full, rest = divmod(len(_leaf(self.data()["x"])), self.batch)
        return self.epochs * (full * (self.batch % shards == 0) + (rest > 0 and rest % shards == 0))

    def is_ruled(self, path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in self.rules)


def _leaf(x: Any) -> Any:
    return next(iter(x.values())) if isinstance(x, dict) else x


def optimizer(name: str) -> Any:
    import keras

    if name == "momentum":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    if name == "adam":
        return keras.optimizers.Adam(0.01)
    if name == "clipped":
        return keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.5)
    raise ValueError(f"no optimizer {name!r}")


# rows of features, classes --------------------------------------------------------------------------------------------

CLASSES = 4


def rows_and_classes(rows: int, *, features: int = 16, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    return {"x": x, "y": rng.integers(0, CLASSES, size=rows).astype("int32")}


def weighted_rows(rows: int) -> dict[str, Any]:
    """Weights that differ by orders of magnitude between the rows, and are zero for some."""
    data = rows_and_classes(rows)
    weights = np.random.default_rng(2).uniform(0.1, 10.0, size=rows).astype("float32")
    weights[::5] = 0.0
    return {**data, "sample_weight": weights}


def class_weighted_rows(rows: int) -> dict[str, Any]:
    return {**rows_and_classes(rows), "class_weight": {0: 5.0, 1: 0.5, 2: 1.0, 3: 0.0}}


def mlp() -> Any:
    """A column-row pair, a regularizer, and a head that no rule touches."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, activation="relu", name="column"),
            layers.Dense(16, name="row", kernel_regularizer=keras.regularizers.L2(0.01)),
            layers.Activation("relu", name="relu"),
            layers.Dense(CLASSES, name="head"),
        ],
        name="mlp",
    )


PAIR = {
    ".*column/kernel": (None, "model"),
    ".*column/bias": ("model",),
    ".*row/kernel": ("model", None),
}

# images ---------------------------------------------------------------------------------------------------------------


def images(rows: int) -> dict[str, Any]:
    """Rows of very different scale: statistics of a part of them are not those of all."""
    rng = np.random.default_rng(3)
    scale = np.linspace(0.2, 3.0, rows).reshape(rows, 1, 1, 1)
    x = (rng.normal(size=(rows, 6, 6, 2)) * scale + scale).astype("float32")
    return {"x": x, "y": rng.integers(0, CLASSES, size=rows).astype("int32")}


def conv_norm() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv_a"),
            layers.BatchNormalization(momentum=0.8, name="norm_a"),
            layers.Activation("relu", name="relu_a"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv_b"),
            layers.BatchNormalization(momentum=0.8, name="norm_b"),
            layers.Activation("relu", name="relu_b"),
            layers.GlobalAveragePooling2D(name="mean"),
            layers.Dense(CLASSES, name="head"),
        ],
        name="conv_norm",
    )


# sequences ------------------------------------------------------------------------------------------------------------

WORDS, LENGTH = 20, 7


def sentences(rows: int) -> dict[str, Any]:
    """Sentences of 1 to 7 words, filled up with 0; a tag for each place."""
    rng = np.random.default_rng(4)
    x = rng.integers(1, WORDS, size=(rows, LENGTH))
    lengths = np.where(np.arange(rows) % 2, LENGTH, 1 + np.arange(rows) % 3)
    x = np.where(np.arange(LENGTH) < lengths[:, None], x, 0).astype("int32")
    return {"x": x, "y": rng.integers(0, CLASSES, size=(rows, LENGTH)).astype("int32")}


def tagger() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(WORDS, 8, mask_zero=True, name="embed"),
            layers.LSTM(8, return_sequences=True, name="lstm"),
            layers.Dense(CLASSES, name="tags"),
        ],
        name="tagger",
    )


# several inputs and outputs -------------------------------------------------------------------------------------------


def two_views(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    left, right = (rng.normal(size=(rows, 6)).astype("float32") for _ in range(2))
    label = rng.integers(0, CLASSES, size=rows).astype("int32")
    value = (left.sum(1, keepdims=True) - right[:, :1]).astype("float32")
    return {"x": {"left": left, "right": right}, "y": {"label": label, "value": value}}


def functional() -> Any:
    """Two inputs through one shared layer, two outputs."""
    import keras

    layers = keras.layers
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    shared = layers.Dense(8, activation="tanh", name="shared")
    both = layers.Concatenate(name="both")([shared(left), shared(right)])
    label = layers.Dense(CLASSES, name="label")(both)
    value = layers.Dense(1, name="value")(both)
    return keras.Model({"left": left, "right": right}, {"label": label, "value": value}, name="functional")


# a class of the user's own --------------------------------------------------------------------------------------------


def residual() -> Any:
    return _user_classes()[0](name="residual")


def contrast() -> Any:
    return _user_classes()[1](name="contrast")


def _user_classes() -> tuple[Any, Any]:
    import keras

    layers, ops = keras.layers, keras.ops

    class Residual(keras.Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.up = layers.Dense(32, activation="gelu", name="up")
            self.down = layers.Dense(16, name="down")
            self.norm = layers.LayerNormalization(name="norm")
            self.head = layers.Dense(CLASSES, name="head")

        def call(self, x: Any) -> Any:
            return self.head(self.norm(x + self.down(self.up(x))))

    class Contrast(Residual):
        """Its loss mixes the rows of a batch: the distances between all pairs of them."""

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            own = super().compute_loss(x, y, y_pred, sample_weight, training)
            apart = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), axis=-1)
            return own + 0.1 * ops.mean(ops.exp(-apart))

    return Residual, Contrast


# all of them ----------------------------------------------------------------------------------------------------------

_CE = {"metrics": ["accuracy"]}
_UP_DOWN = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
_TAGS = {
    ".*embed/embeddings": ("model", None),
    ".*lstm_cell/kernel": (None, "model"),
    ".*tags/kernel": (None, "model"),
}

CASES = {
    case.name: case
    for case in (
        # 24 rows in batches of 8: always even.
        Case("mlp", mlp, lambda: rows_and_classes(24), "momentum", PAIR, 8, compile=_CE),
        # 10 rows in batches of 4: the last has 2, and on four data shards two of them have no row.
        Case("mlp_ragged_adam", mlp, lambda: rows_and_classes(10), "adam", PAIR, 4, compile=_CE),
        Case("mlp_clipped", mlp, lambda: rows_and_classes(22), "clipped", PAIR, 8, shuffle=True, compile=_CE),
        Case(
            "mlp_sample_weight",
            mlp,
            lambda: weighted_rows(10),
            "momentum",
            PAIR,
            4,
            compile={"weighted_metrics": ["accuracy"]},
        ),
        Case("mlp_class_weight", mlp, lambda: class_weighted_rows(11), "momentum", PAIR, 4, compile=_CE),
        Case(
            "conv_norm",
            conv_norm,
            lambda: images(18),
            "momentum",
            {".*conv_./kernel": (None, None, None, "model")},
            8,
            compile=_CE,
        ),
        Case("tagger", tagger, lambda: sentences(18), "adam", _TAGS, 8, compile=_CE),
        Case(
            "functional",
            functional,
            lambda: two_views(22),
            "adam",
            {"shared/kernel": (None, "model"), "shared/bias": ("model",)},
            8,
            compile={"loss_weights": {"label": 1.0, "value": 0.3}},
        ),
        Case("residual", residual, lambda: rows_and_classes(22), "momentum", _UP_DOWN, 8, compile=_CE),
        Case("contrast", contrast, lambda: rows_and_classes(10), "momentum", _UP_DOWN, 4, late=True, compile=_CE),
    )
}


def losses(case: Case) -> Any:
    """The loss of a case: cross entropy of integer classes, and squared error for the functional model's value."""
    import keras

    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"label": entropy, "value": "mse"} if case.build is functional else entropy
