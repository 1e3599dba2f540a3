"""Programs of test_low.py, one in each process: models under a mixed policy, with stored shards."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, scope, strategy, told
from unidist.keras.patching.compat import AutocastScope


class Exact(layers.Layer):  # type: ignore[misc]
    """Reads its weight as it is stored, inside of a layer that computes in low precision."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], 16), name="kernel")

    def call(self, x: Any) -> Any:
        with AutocastScope(None):
            return ops.matmul(ops.cast(x, "float32"), self.kernel)


class Twice(layers.Layer):  # type: ignore[misc]
    """Reads its weight twice."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        return ops.matmul(ops.tanh(ops.matmul(x, self.kernel)), self.kernel)


def dense(n: int, **options: Any) -> Any:
    return layers.Dense(n, "tanh", **options)


def stacks(policy: str) -> dict[str, list[Any]]:
    head = layers.Dense(4, dtype="float32")
    return {
        "dense": [dense(32, dtype=policy, name="column"), dense(16, dtype=policy), layers.Dense(4, dtype=policy)],
        "a cell of its own dtype": [layers.RNN(layers.SimpleRNNCell(16, dtype="float32"), dtype=policy), head],
        "exact": [Exact(dtype=policy), head],
        "twice": [dense(16, dtype=policy), Twice(dtype=policy), head],
        "recurrent": [dense(16, dtype=policy), layers.SimpleRNN(16, dtype=policy), head],
    }


def trained(name: str, policy: str, kind: str | None, zero: int) -> Result:
    """Three steps, what they sent, and the dtypes of the all_gathers that a gradient asks for."""
    fresh()
    rng = np.random.default_rng(3)
    shape = (6, 12) if name in ("recurrent", "a cell of its own dtype") else (12,)
    x, y = rng.normal(size=(24, *shape)).astype("float32"), rng.normal(size=(24, 4)).astype("float32")
    with scope(strategy(kind, {".*column/kernel": (None, "model"), ".*column/bias": ("model",)}, zero=zero)):
        model = keras.Sequential([keras.Input(shape), *stacks(policy)[name]], name="model")
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        with unidist.ledger() as book:
            history = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
        asked = _asked(model, x[:8]) if kind is not None else {}
    return {
        "history": history,
        "sent": {op: (book.count(op), book.bytes(op)) for op in sorted({event.op for event in book.events})},
        "weights' bytes": sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables),
        "asked": asked,
        **told(model),
    }


def _asked(model: Any, x: Any) -> dict[str, int]:
    def loss(values: Any) -> Any:
        outputs, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], x, training=True)
        return ops.mean(ops.square(outputs))

    text = jax.jit(jax.grad(loss)).lower([v.value for v in model.trainable_variables]).as_text()
    return Counter(re.findall(r'"stablehlo\.all_gather".*?-> tensor<[0-9x]*x(\w+)>', text, re.DOTALL))
