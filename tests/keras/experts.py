"""A small language model with experts, and what the processes of its tests run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, scope, told

# The last batch is smaller; on JAX it would be another program.
ROWS, BATCH = (8 if keras.config.backend() == "jax" else 6), 4
LENGTH, WIDTH, HIDDEN, WORDS = 5, 8, 12, 12
EXPERTS, CHOSEN = 4, 2


class Bank(layers.Layer):
    """What all experts make of all tokens."""

    def build(self, shape: Any) -> None:
        self.up = self.add_weight(shape=(EXPERTS, WIDTH, HIDDEN), name="up")
        self.low = self.add_weight(shape=(EXPERTS, HIDDEN), initializer="normal", name="low")
        self.down = self.add_weight(shape=(EXPERTS, HIDDEN, WIDTH), name="down")

    def call(self, tokens: Any) -> Any:
        hidden = ops.gelu(ops.einsum("td,edh->eth", tokens, self.up) + self.low[:, None])
        return ops.einsum("eth,ehd->etd", hidden, self.down)


class Mixture(layers.Layer):
    """Each token is what its best experts make of it; their load is balanced over the whole batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.router, self.bank = layers.Dense(EXPERTS, name="router"), Bank(name="bank")

    def build(self, shape: Any) -> None:
        self.router.build((None, WIDTH))
        self.bank.build((None, WIDTH))

    def call(self, x: Any) -> Any:
        tokens = ops.reshape(x, (-1, WIDTH))
        chances = ops.softmax(self.router(tokens))
        best, which = ops.top_k(chances, CHOSEN)
        chosen = ops.one_hot(which, EXPERTS)
        weights = ops.sum(chosen * best[..., None], axis=1)
        self.add_loss(0.1 * ops.sum(ops.mean(ops.sum(chosen, axis=1), axis=0) * ops.mean(chances, axis=0)))
        out = ops.sum(self.bank(tokens) * ops.transpose(weights)[:, :, None], axis=0)
        return ops.reshape(out, ops.shape(x))


def net() -> Any:
    given = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="embedding")(given)
    for k in range(2):
        x = x + Mixture(name=f"mixture{k}")(layers.LayerNormalization(name=f"norm{k}")(x))
    return keras.Model(given, layers.Dense(WORDS, name="words")(x))


def trained(
    sizes: dict[str, int] | None, zero: int = 0, experts: str = "all", alike: bool = False, rows: int = ROWS
) -> Result:
    """Trains on the next token.

    Args:
        sizes: of the mesh, None for one device.
        alike: all tokens are one, and choose the same two experts.
    """
    fresh()
    rng = np.random.default_rng(5)
    x = np.ones((rows, LENGTH), int) if alike else rng.integers(1, WORDS, (rows, LENGTH))
    chosen = None if sizes is None else unidist.ModelParallel(unidist.Mesh(sizes), zero=zero, experts=experts)
    with scope(chosen), unidist.ledger() as book:
        model = net()
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        y = np.roll(x, -1, 1)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        why = "" if sizes is None else "".join(unidist.describe(model).why.values())
        banks = [row for row in unidist.describe(model).rows if row.kind == "weights" and "bank" in row.path]
    return {
        "history": history,
        "evaluated": evaluated,
        "predicted": predicted,
        "_why": why,
        "_held": {row.path.split("/")[-1]: row.local_shape[0] for row in banks},
        "_sent": Counter(event.op for event in book.events if event.axes == ("model",)),
        **told(model),
    }


def dispatched() -> None:
    unidist.DataParallel(experts="dispatch")


def dying(at: int) -> None:
    """The last process is killed as rows are sent to experts, in the so-manieth such exchange of a second step."""
    from unidist import session
    from unidist.keras.torch.layers.sending import Sending

    fresh()
    x = np.random.default_rng(5).integers(1, WORDS, (BATCH, LENGTH))
    with unidist.ModelParallel(unidist.Mesh({"expert": session.process_count()}), experts="dispatch").scope():
        model = net()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.train_on_batch(x, x)
    sent, own = [], Sending._sent

    def exchange(sending: Sending, *rows: Any) -> Any:
        sent.append(rows)
        if len(sent) == at and session.process_index() == session.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(sending, *rows)

    with mock.patch.object(Sending, "_sent", exchange):
        model.train_on_batch(x, x)
