"""Runs of a planned model call one of several blocks that are alike, and find what calling each finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import pytest
from keras import layers, ops

import unidist
from unidist.keras.planning import facts
from unidist.keras.planning.repeated_calls import Repeats
from unidist.planner.facts import Facts, LayerFact

WIDTH, BLOCKS = 8, 5
CALLS: list[Any] = []


class Norm(layers.Layer):
    """Notes its calls."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=shape[-1:], name="scale")

    def call(self, x: Any) -> Any:
        CALLS.append(self)
        return self.scale * x / (1 + ops.mean(ops.abs(x), axis=-1, keepdims=True))


class Block(layers.Layer):
    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.norm, self.up, self.down = Norm(), layers.Dense(16, "gelu"), layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        for layer in (self.norm, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)))


class Dropping(Block):
    """Draws, and so writes a seed's state."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.drop = layers.Dropout(0.3)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.drop(self.down(self.drop(self.up(self.norm(x)))))


class Masked(Block):
    """Takes a table that is one for all blocks, and gives it on; autograd keeps it once."""

    def call(self, x: Any, table: Any = None) -> Any:
        return x * table + self.down(self.up(self.norm(x)) * 2.0), table


class Half(layers.Layer):
    """Is first of a pair with the next one, and second of one with the one before: NaN leaves it, and comes to it."""

    def build(self, shape: Any) -> None:
        self.product = layers.Dense(WIDTH, "gelu")
        self.product.build(shape)
        self.bias = self.add_weight(shape=(WIDTH,), name="bias")

    def call(self, x: Any) -> Any:
        return self.product(x * 1.5) ** 2 + self.bias


class Viewing(Block):
    def call(self, x: Any) -> Any:
        _, length, width = x.shape
        return ops.reshape(ops.reshape(super().call(x), (-1, length * width)) * 1.5, (-1, length, width))


class Gathering(Block):
    """Keeps whole numbers for its backward, of the shape of what the block before has kept last."""

    def call(self, x: Any) -> Any:
        wide = ops.concatenate([x, x], axis=-1)
        order = ops.flip(ops.argsort(ops.stop_gradient(wide), axis=-1), -1)
        picked = ops.take_along_axis(wide, order, axis=-1)
        return x + self.down(self.up(self.norm(picked[..., :WIDTH])))


class Counting(Block):
    """Keeps numbers of what it is given."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.count = self.add_weight(shape=shape[-1:], trainable=False, name="count", initializer="zeros")

    def call(self, x: Any) -> Any:
        self.count.assign(self.count + ops.mean(x, axis=(0, 1)))
        return super().call(x) + self.count


def stack(kind: Callable[..., Any], count: int = BLOCKS, between: Callable[[int], Any] = lambda k: None) -> keras.Model:
    keras.utils.clear_session()
    inputs = keras.Input((None, WIDTH))
    # As what a block gives is: not what a product has made itself.
    x = layers.Dense(WIDTH)(inputs) * 1.0
    table = layers.Dense(WIDTH)(inputs) if kind is Masked else None
    for k in range(count):
        block = between(k) or kind()
        x, *_ = block(x, table) if table is not None else (block(x),)
    return keras.Model(inputs, layers.Dense(4)(x))


def different(k: int) -> Any:
    """Every other block is another."""
    return Dropping() if k % 2 else None


def twice(kind: Callable[[], Any]) -> Callable[[int], Any]:
    blocks: list[Any] = []
    return lambda k: blocks[-1] if k % 2 else blocks.append(kind()) or blocks[-1]


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{kind.__name__: lambda kind=kind: stack(kind) for kind in (Block, Dropping, Masked, Viewing)},
    **{kind.__name__: lambda kind=kind: stack(kind) for kind in (Gathering, Counting)},
    "two kinds in turn": lambda: stack(Block, between=different),
    "halves": lambda: stack(Half, between=lambda k: Norm() if k == 2 else None),
    "called twice": lambda: stack(Block, between=twice(Dropping)),
}


def found(model: keras.Model) -> Facts:
    """With numbers for tensors that are alike in each reading."""
    known: dict[int, int] = {}

    def numbered(layer: LayerFact) -> LayerFact:
        calls = (
            replace(x, inputs=tuple(known.setdefault(k, len(known)) for k in x.inputs))
            for x in (layer.calls, layer.scores)
        )
        return replace(layer, **dict(zip(("calls", "scores"), calls, strict=True)))

    read = facts.read(model, 2)
    return replace(read, layers=tuple(map(numbered, read.layers)))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_what_is_found_is_what_calling_each_block_finds(
    make: Callable[[], keras.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    by_repeating = found(model)
    monkeypatch.setattr(Repeats, "call", lambda self, layer, rest, args, kwargs: rest(*args, **kwargs))
    assert found(model) == by_repeating
    assert len(by_repeating.activations) > 2 * BLOCKS
    assert any(one.behind for one in by_repeating.activations)


def calls_of_a_plan(count: int) -> int:
    model = stack(Block, count)
    CALLS.clear()
    unidist.plan(model, unidist.Mesh({"model": 2}))
    return len(CALLS)


def test_a_block_more_is_called_to_be_kept_to_be_changed_and_for_what_it_sends() -> None:
    """It is run to be kept, for three changes that arrive in it, and for what a step sends."""
    few, many = calls_of_a_plan(4), calls_of_a_plan(12)
    assert many - few <= 5 * 8
