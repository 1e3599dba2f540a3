"""Models that draw random numbers as they train, and what the processes of their tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import unidist
from tests.support.runs import PAIR, Result, fresh, scope, strategy, told

ROWS, BATCH, IMAGE = 22, 8, (6, 6, 3)


def of_images(seed: int | None) -> Any:
    """A net with a dropout, noise and a random flip."""
    drawn = [layers.RandomFlip(seed=seed), layers.Conv2D(4, 3, activation="relu"), layers.Dropout(0.4, seed=seed)]
    dense = [layers.Flatten(), layers.Dense(8, activation="relu", name="column"), layers.GaussianNoise(0.3, seed=seed)]
    return keras.Sequential(
        [keras.Input(IMAGE), *drawn, *dense, layers.Dropout(0.2, seed=seed), layers.Dense(2, name="row")]
    )


def ending(*drawn: Any, shape: tuple[int, ...] = IMAGE) -> Callable[[Any], Any]:
    """A net of a few layers that draw."""

    def build(seed: Any) -> Any:
        made = [one(seed) for one in drawn]
        return keras.Sequential([keras.Input(shape), *made, layers.Flatten(), layers.Dense(2)])

    return build


def attention(seed: Any) -> Any:
    given = keras.Input((5, 4))
    mixed = layers.MultiHeadAttention(2, 3, dropout=0.4, seed=seed)(given, given)
    return keras.Model(given, layers.Dense(2)(layers.Flatten()(mixed)))


CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "images": (of_images, IMAGE),
    "augmented": (
        ending(
            lambda seed: layers.RandomRotation(0.2, seed=seed),
            lambda seed: layers.RandomContrast(0.3, value_range=(0, 1), seed=seed),
            lambda seed: layers.RandomZoom(0.2, seed=seed),
        ),
        IMAGE,
    ),
    "channels": (ending(lambda seed: layers.SpatialDropout2D(0.4, seed=seed)), IMAGE),
    "alpha": (ending(lambda seed: layers.AlphaDropout(0.4, seed=seed), shape=(6,)), (6,)),
    "steps": (ending(lambda seed: layers.Dropout(0.4, noise_shape=(None, 1, 4), seed=seed), shape=(5, 4)), (5, 4)),
    "recurrent": (
        ending(lambda seed: layers.LSTM(6, dropout=0.4, recurrent_dropout=0.3, seed=seed), shape=(5, 4)),
        (5, 4),
    ),
    "attention": (attention, (5, 4)),
}


def trained(kind: str | None, zero: int, name: str, seed: int | None) -> Result:
    """Trains, evaluates; `kind`: None for one device."""
    fresh()
    build, shape = CASES[name]
    rng = np.random.default_rng(3)
    x, y = rng.uniform(size=(ROWS, *shape)).astype("float32"), rng.normal(size=(ROWS, 2)).astype("float32")
    chosen = None if kind is None else strategy(kind, PAIR, zero=zero, exact_random=True)
    with scope(chosen), unidist.ledger() as book:
        model = build(seed)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "_sent": len(book.events),
        "_why": "" if kind is None else str(unidist.describe(model).why),
        **told(model),
    }
