"""The small nets that the promises train, on every backend: their data, their strategies and how they are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import layers, ops, optimizers

from tests.support.runs import Result, fresh, made_ready, scope, strategy, told

CLASSES, BATCH = 4, 4
# Batches of another size are another program, which TensorFlow compiles for seconds: with it those of tests/parity/
# test_training.py are ragged. Elsewhere there are four batches, the last of two rows.
IS_EVEN = keras.config.backend() == "tensorflow"
ROWS = 12 if IS_EVEN else 14
# Rows of a batch: on JAX two of one size, which its devices do not divide.
EVALUATED = {"tensorflow": BATCH, "jax": 7, "torch": 5}[keras.config.backend()]
# And JAX: what an optimizer makes of gradients does not depend on the rows that they are of.
FEW_PROGRAMS = keras.config.backend() != "torch"
RULES: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*b/kernel": ("model", None)}


def rows(count: int = ROWS) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(count, 12)).astype("float32"), rng.integers(0, CLASSES, count).astype("int32")


def plain() -> Any:
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(16, "relu", name="a"),
            layers.Dense(8, "tanh", name="b"),
            layers.Dense(CLASSES, name="c"),
        ],
        name="plain",
    )


class Penalty(layers.Layer):
    """Adds a loss of its call, which is a mean over the rows."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def regularized(**norm: Any) -> Any:
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(16, "relu", name="a", kernel_regularizer="l2", activity_regularizer="l1"),
            Penalty(name="penalty"),
            # A bias before batch statistics has no gradient but rounding noise.
            layers.Dense(8, name="b", use_bias=False, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02)),
            # Batches have as few as two rows. Divided by what is left of them with Keras's epsilon, float32's rounding,
            # which is another on each kind of processor, becomes larger than 1e-5 on one device too.
            layers.BatchNormalization(name="norm", epsilon=0.3, **norm),
            # On torch each rank draws for its own rows.
            layers.GaussianNoise(0.1 if keras.config.backend() == "jax" else 0.0, seed=5, name="noise"),
            layers.Dense(CLASSES, name="c"),
        ],
        name="regularized",
    )


def sgd(**options: Any) -> Any:
    return optimizers.SGD(**{"learning_rate": 0.1, **options})


def adam(**options: Any) -> Any:
    # With Keras's epsilon of 1e-7 Adam turns rounding noise of gradients that are nearly zero into whole steps.
    return optimizers.Adam(0.01, epsilon=1e-3, **options)


def crossed(model: Any, optimizer: Any, **options: Any) -> Any:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


@contextlib.contextmanager
def begun(kind: str | None, zero: int, rules: Any = RULES) -> Iterator[None]:
    """Inside, names and seeds are as at a program's start, and models are placed by a strategy; None: on one device."""
    fresh()
    with scope(None if kind is None else strategy(kind, rules, zero=zero)):
        yield


def fitted_on_even(model: Any, evaluates: bool = True) -> Result:
    """On batches of one size, where each other one is a program more, and so is an evaluation."""
    return fitted(model, *rows(12), evaluated=BATCH * evaluates) if FEW_PROGRAMS else fitted(model, *rows())


def fitted(model: Any, x: Any, y: Any, *, evaluated: int = EVALUATED, **options: Any) -> Result:
    model = made_ready(model)
    batch = options.pop("batch_size", BATCH)
    history = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0, **options).history
    seen = told(model)  # now: Keras on JAX loses the averages of a model that is evaluated
    if not evaluated:
        return {"history": history, **seen}
    found = model.evaluate(x, y, batch_size=evaluated, verbose=0, return_dict=True)
    return {"history": history, "evaluate": found, **seen}
