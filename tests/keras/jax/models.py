"""Small models with their data, for what the JAX engine does. The same names everywhere, so that paths agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tests.support.runs import PAIR

CLASSES = 4
ROWS, BATCH = 26, 6  # five batches, the last of two rows


class Case(NamedTuple):
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    rules: dict[str, tuple[str | None, ...]]
    compile: dict[str, Any]


def _labels(rng: np.random.Generator, rows: int) -> Any:
    return rng.integers(0, CLASSES, rows).astype("int32")


def _plain(*shape: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.3, 2.0, ROWS).reshape(ROWS, *([1] * len(shape)))
    return {"x": (rng.normal(size=(ROWS, *shape)) * scale + scale).astype("float32"), "y": _labels(rng, ROWS)}


def mlp() -> Any:
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, "relu", name="column", kernel_regularizer=keras.regularizers.L2(0.01)),
            keras.layers.Dropout(0.2, seed=3, name="drop"),
            keras.layers.Dense(16, "relu", name="row"),
            keras.layers.Dense(CLASSES, name="head"),
        ],
        name="mlp",
    )


def mlp_data() -> dict[str, Any]:
    data = _plain(12)
    weights = np.random.default_rng(5).uniform(0.1, 10, ROWS).astype("float32")
    weights[::6] = 0.0
    return {**data, "sample_weight": weights}


def conv() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, use_bias=False, name="column"),
            keras.layers.BatchNormalization(momentum=0.7, name="norm"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Conv2D(8, 3, strides=2, name="second"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(CLASSES, name="head"),
        ],
        name="conv",
    )


def conv_data() -> dict[str, Any]:
    return {**_plain(8, 8, 3, seed=1), "class_weight": {0: 3.0, 1: 0.5, 2: 1.0, 3: 0.0}}


def lstm() -> Any:
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            keras.layers.Embedding(20, 8, mask_zero=True, name="embed"),
            keras.layers.LSTM(8, return_sequences=True, name="lstm"),
            keras.layers.TimeDistributed(keras.layers.Dense(CLASSES, name="head"), name="heads"),
        ],
        name="lstm",
    )


def lstm_data() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    ids = rng.integers(1, 20, (ROWS, 7)).astype("int32")
    lengths = np.linspace(1, 7, ROWS).astype("int32")
    ids[np.arange(7)[None, :] >= lengths[:, None]] = 0
    return {"x": ids, "y": rng.integers(0, CLASSES, (ROWS, 7)).astype("int32")}


def two_outputs() -> Any:
    """A layer used twice, two inputs, two outputs with a loss each."""
    left, right = keras.Input((12,), name="left"), keras.Input((12,), name="right")
    shared = keras.layers.Dense(16, "tanh", name="column")
    both = keras.layers.Concatenate(name="both")([shared(left), shared(right)])
    outputs = {
        "label": keras.layers.Dense(CLASSES, name="label")(both),
        "value": keras.layers.Dense(1, name="value")(both),
    }
    return keras.Model({"left": left, "right": right}, outputs, name="two")


def two_outputs_data() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    x = {name: rng.normal(size=(ROWS, 12)).astype("float32") for name in ("left", "right")}
    return {"x": x, "y": {"label": _labels(rng, ROWS), "value": rng.normal(size=(ROWS, 1)).astype("float32")}}


def _direction(x: Any) -> Any:
    """No number where a row is zeros."""
    return x / keras.ops.norm(x, axis=-1, keepdims=True)


class Penalized(keras.layers.LayerNormalization):
    """Adds a loss of its weights, so that its call keeps rows apart and yet does more than to give outputs."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.gamma)))
        return super().call(x)


class Subclassed(keras.Model):
    """Has no variables before its first batch, losses added in calls, and a residual."""

    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.column = keras.layers.Dense(12, _direction, name="column")
        self.norm = Penalized(name="norm")
        self.head = keras.layers.Dense(CLASSES, name="head")

    def call(self, x: Any) -> Any:
        hidden = self.norm(x + self.column(x))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(hidden)))
        return self.head(hidden)


CROSS = "cross entropy"
CASES = {
    "mlp": Case(mlp, mlp_data, PAIR, {"weighted_metrics": ["accuracy"]}),
    "conv": Case(conv, conv_data, {".*column/kernel": (None, None, None, "model")}, {"metrics": ["accuracy"]}),
    "lstm": Case(
        lstm,
        lstm_data,
        {".*embed/embeddings": (None, "model"), ".*lstm.*/kernel": (None, "model")},
        {"metrics": ["accuracy"]},
    ),
    "two_outputs": Case(
        two_outputs,
        two_outputs_data,
        {".*column/kernel": (None, "model")},
        {"loss": {"label": CROSS, "value": "mse"}, "loss_weights": {"label": 1.0, "value": 0.3}},
    ),
    "subclassed": Case(
        Subclassed,
        lambda: _plain(12, seed=4),
        {".*column/kernel": (None, "model"), ".*column/bias": ("model",)},
        {"metrics": ["accuracy"]},
    ),
}


def optimizer(name: str) -> Any:
    if name == "momentum":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    # With Keras's epsilon of 1e-7 Adam turns rounding noise of gradients that are nearly zero into whole steps.
    return keras.optimizers.Adam(0.01, epsilon=1e-4)


def compile_case(model: Any, case: Case, name: str, **options: Any) -> None:
    cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    chosen = {"loss": CROSS, **case.compile, **options}
    loss = chosen["loss"]
    if isinstance(loss, dict):
        chosen["loss"] = {key: cross if value == CROSS else value for key, value in loss.items()}
    elif loss == CROSS:
        chosen["loss"] = cross
    model.compile(optimizer(name), **chosen)
