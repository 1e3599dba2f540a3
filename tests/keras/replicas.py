"""A small language model under ZeRO, and what the processes of its tests run."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import unidist
from tests.support.runs import Result, fresh, scope, told

BATCH, LENGTH, WIDTH, WORDS = 8, 4, 8, 12
# A ragged batch would be compiled once more.
ROWS = 28 if keras.config.backend() == "torch" else 24


def net() -> Any:
    given = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="embedding")(given)
    x = x + layers.Dense(WIDTH, activation="tanh", name="mixed")(layers.LayerNormalization(name="norm")(x))
    x = layers.BatchNormalization(name="moving")(x)
    return keras.Model(given, layers.Dense(WORDS, name="words")(layers.Dense(16, activation="relu", name="up")(x)))


def strategy(sizes: dict[str, int], zero: int) -> Any:
    if "model" in sizes:
        data = ("replica", "shard")
        return unidist.ModelParallel(unidist.Mesh(sizes), data_axis=data, zero=zero, shard_axis="shard")
    return unidist.DataParallel(unidist.Mesh(sizes), zero=zero, shard_axis="shard")


def on_eight(sizes: dict[str, int], zero: int) -> Result:
    """With eight virtual devices, whatever this process has."""
    unidist.use("sim", devices=8)
    try:
        return trained(sizes, zero)
    finally:
        unidist.use("sim", devices=4)


def trained(sizes: dict[str, int] | None, zero: int = 0, rows: int = ROWS) -> Result:
    """Trains on the next token; `sizes`: of the mesh, None for one device."""
    fresh()
    x = np.random.default_rng(5).integers(1, WORDS, (rows, LENGTH))
    y = np.roll(x, -1, 1)
    with scope(None if sizes is None else strategy(sizes, zero)):
        model = net()
        model.compile(
            keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        with unidist.ledger() as book:
            history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
    sent: dict[str, float] = {}
    for event in book.events:
        what = f"{event.op} {','.join(event.axes)} {event.purpose}"
        sent[what] = sent.get(what, 0) + float(event.bytes)
    said = unidist.describe(model)
    learning = {v.path for v in model.trainable_variables}
    return {
        "history": history,
        "evaluated": evaluated,
        "predicted": predicted,
        "_steps": 2 * -(-rows // BATCH),
        "_bytes": sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables),
        "_held": sum(row.bytes_per_device for row in said.rows if row.path in learning),
        "_slots": said.bytes_of("slots"),
        "_sent": sent,
        **told(model),
    }
