"""Collaborative filtering: what a user thinks of a film, from a vector and a bias of each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

USERS, FILMS, ROWS, BATCH = 12, 10, 22, 8


class Recommender(keras.Model):
    """`product`: of each user's vector with its film's, or the sum of all products in the batch."""

    def __init__(self, product: str) -> None:
        super().__init__(name="recommender")
        self.product = product
        self.user = layers.Embedding(USERS, 4, embeddings_regularizer=keras.regularizers.L2(1e-3), name="user")
        self.user_bias = layers.Embedding(USERS, 1, name="user_bias")
        self.film = layers.Embedding(FILMS, 4, embeddings_regularizer=keras.regularizers.L2(1e-3), name="film")
        self.film_bias = layers.Embedding(FILMS, 1, name="film_bias")

    def call(self, ids: Any) -> Any:
        user, film = self.user(ids[:, 0]), self.film(ids[:, 1])
        if self.product == "of rows":
            match = ops.sum(user * film, axis=1, keepdims=True)
        else:
            match = ops.tensordot(user, film, 2)
        return ops.sigmoid(5 * match + self.user_bias(ids[:, 0]) + self.film_bias(ids[:, 1]))


def run(steps: int = 2, product: str = "of rows") -> dict[str, Any]:
    rng = np.random.default_rng(1)
    ids = np.stack([rng.integers(0, USERS, ROWS), rng.integers(0, FILMS, ROWS)], axis=1).astype("int32")
    rating = rng.uniform(size=(ROWS, 1)).astype("float32")
    model = Recommender(product)
    model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), keras.losses.BinaryCrossentropy(), metrics=["mae"])
    held = (ids[:6], rating[:6])
    history = model.fit(
        ids, rating, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0, validation_data=held
    ).history
    best = np.argsort(-model.predict(np.stack([np.full(FILMS, 3), np.arange(FILMS)], 1), verbose=0)[:, 0])[:3]
    return {**history, "best": best, "weights": model.get_weights()}


def run_of_the_batch(steps: int = 2) -> dict[str, Any]:
    return run(steps, "of all")
