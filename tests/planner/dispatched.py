"""A model of experts that are chosen alike, whatever it is given: row t has the kernels t and t + 1."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist

EXPERTS, CHOSEN, WIDTH, ROWS = 4, 2, 8, 8


class Bank(layers.Layer):
    def build(self, shape: Any) -> None:
        self.up = self.add_weight(shape=(EXPERTS, WIDTH, 24), name="up")
        self.down = self.add_weight(shape=(EXPERTS, 24, WIDTH), name="down")

    def call(self, x: Any) -> Any:
        return ops.einsum("eth,ehd->etd", ops.gelu(ops.einsum("td,edh->eth", x, self.up)), self.down)


class Mixture(layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bank, self.gate = Bank(name="bank"), layers.Dense(EXPERTS, name="gate")

    def build(self, shape: Any) -> None:
        self.bank.build((None, WIDTH))
        self.gate.build((None, WIDTH))

    def call(self, x: Any) -> Any:
        rows = ops.reshape(x, (-1, WIDTH))
        first = ops.arange(ops.shape(rows)[0])
        chosen = sum(ops.one_hot((first + k) % EXPERTS, EXPERTS) for k in range(CHOSEN))
        weights = ops.transpose(ops.sigmoid(self.gate(rows)) * chosen)
        return ops.reshape(ops.sum(self.bank(rows) * weights[:, :, None], axis=0), ops.shape(x))


def net() -> Any:
    given = keras.Input((8,), dtype="int32")
    x = layers.Embedding(12, WIDTH)(given)
    for k in range(2):
        x = x + Mixture(name=f"mixture{k}")(layers.LayerNormalization()(x))
    return keras.Model(given, x)


def on_jax(sizes: dict[str, int], experts: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes along the axis of experts: of a compiled step, and as planned."""
    mesh = unidist.Mesh(sizes)
    model = unidist.parallelize(net(), unidist.ModelParallel(mesh, experts=experts))
    model.compile("sgd", "mse")
    with unidist.ledger() as sent:
        model.train_on_batch(np.zeros((ROWS, 8), int), np.zeros((ROWS, 8, WIDTH), "float32"))
    plan = unidist.plan(model, mesh, batch=ROWS, experts=experts)
    found: list[Counter[str]] = []
    for events in (sent.events, plan.predicted.events):
        found.append(Counter())
        for event in events:
            if event.axes == ("expert",):
                found[-1][event.op] += float(event.bytes)
    return dict(found[0]), dict(found[1])
