"""Layers of one kind behave alike: what an answer for one says holds for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import unidist
from unidist.keras.planning.repeated_calls import Kinds


@dataclass(frozen=True)
class Axes:
    summed: str
    sizes: tuple[int, ...] = (2, 3)


class Holding(layers.Layer):  # type: ignore[misc]
    """Holds something, as layers of Keras hold what they were made with."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def call(self, x: Any) -> Any:
        return x


def number(*made: layers.Layer) -> int:
    """Of how many kinds layers are."""
    kinds = Kinds()
    for layer in made:
        layer(keras.Input((4, 6)))
    return len({kinds.of(layer) for layer in made})


ALIKE: dict[str, Callable[[], layers.Layer]] = {
    "dense": lambda: layers.Dense(8, "gelu", kernel_initializer=keras.initializers.GlorotUniform(seed=1)),
    "einsum": lambda: layers.EinsumDense("abc,cd->abd", (None, 8)),
    "attention": lambda: Attending(2, 3),
    "fields": lambda: Holding(Axes("ab")),
    "list": lambda: Holding([1, {"a": (2, None)}]),
}


class Attending(layers.MultiHeadAttention):  # type: ignore[misc]
    """Attends to what it takes."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x, x)


@pytest.mark.parametrize("made", ALIKE.values(), ids=ALIKE)
def test_layers_that_were_made_alike_are_of_one_kind(made: Callable[[], layers.Layer]) -> None:
    assert number(made(), made()) == 1


DIFFERENT: dict[str, tuple[Callable[[], layers.Layer], Callable[[], layers.Layer]]] = {
    "activation": (lambda: layers.Dense(8, "gelu"), lambda: layers.Dense(8, "relu")),
    "equation": (
        lambda: layers.EinsumDense("abc,cd->abd", (None, 6)),
        lambda: layers.EinsumDense("abc,dc->abd", (None, 6)),
    ),
    "class": (lambda: layers.Dense(8), lambda: layers.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d")),
    "fields": (lambda: Holding(Axes("ab")), lambda: Holding(Axes("ab", (2, 4)))),
    "nested": (lambda: Holding([1, {"a": (2, None)}]), lambda: Holding([1, {"a": (2, 0)}])),
    "what cannot be compared": (lambda: Holding(object()), lambda: Holding(object())),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_layers_that_differ_are_of_two(one: Callable[[], layers.Layer], other: Callable[[], layers.Layer]) -> None:
    assert number(one(), other()) == 2


def test_layers_are_of_one_kind_where_unidist_calls_one_of_them_by_a_rule() -> None:
    one, other = (layers.Dense(8, name=name) for name in ("one", "other"))
    grid = unidist.Mesh({"model": 4})
    model = keras.Sequential([keras.Input((8,)), one, other])
    model.compile("sgd", "mse")
    unidist.parallelize(model, unidist.ModelParallel(grid, unidist.LayoutMap(grid, {".*one/kernel": (None, "model")})))
    model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
    kinds = Kinds()
    assert kinds.of(one) == kinds.of(other)
