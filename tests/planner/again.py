"""Steps of training whose blocks are computed again in backward, and what is held in them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from keras import layers

import unidist
from tests.planner.steps import parameters
from tests.support.saving import saved_bytes
from unidist.backends.torch.sharded import ShardedTensor
from unidist.keras.patching.compat import get_device
from unidist.keras.patching.layer_calls import Stage, around
from unidist.keras.recomputing import chosen

ROWS, LENGTH, WIDTH = 6, 24, 64
MESHES = {"one": {"data": 1}, "data": {"data": 2}, "model": {"model": 2}}


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
        self.mixing = layers.MultiHeadAttention(4, 16, dropout=0.1)
        self.up, self.down, self.drop = layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH), layers.Dropout(0.1)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(shape)
        self.mixing.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x: Any) -> Any:
        given = self.first(x)
        x = x + self.mixing(given, given)
        return x + self.down(self.drop(self.up(self.second(x))))


def net() -> Any:
    given = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, WIDTH)(given)
    for _ in range(8):
        x = Block()(x)
    return keras.Model(given, layers.Dense(10)(x))


def part(x: torch.Tensor) -> torch.Tensor:
    return part(x.local) if isinstance(x, ShardedTensor) else x


def held_in_a_step(kind: str, remat: str) -> tuple[int, int, int, Any, Any]:
    """Bytes that are planned, those that a step holds, those that it would without, and what is sent and planned so.

    A step holds what autograd keeps outside of the layers that are computed again, what these take, and of one of them
    what autograd keeps inside.
    """
    mesh = unidist.Mesh(MESHES[kind])
    unidist.use("sim", devices=mesh.size)
    model = net()
    plan, every = (unidist.plan(model, mesh, batch=ROWS, sequence=LENGTH, remat=how) for how in (remat, "none"))
    strategy = unidist.ModelParallel if kind == "model" else unidist.DataParallel
    unidist.parallelize(model, strategy(mesh, remat=remat))
    weights = [x for v in model.variables for x in parameters(v)]
    inside: list[int] = []
    kept: dict[int, int] = {}
    known = {x.untyped_storage().data_ptr() for x in weights}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def looking(rest: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(get_device()) == "meta":
                return rest(*args, **kwargs)
            given = [part(x) for x in keras.tree.flatten((args, kwargs)) if isinstance(x, torch.Tensor)]
            for x in given:
                keep(x)
            out, size = saved_bytes(lambda: rest(*args, **kwargs), [*weights, *given])
            inside.append(size)
            return out

        return call

    model.compile("sgd", "mse")
    rows = np.ones((ROWS, LENGTH), int), np.zeros((ROWS, LENGTH, 10), "float32")
    model.train_on_batch(*rows)
    with unidist.ledger() as sent:
        model.train_on_batch(*rows)
    for layer in chosen(model, remat):
        around(layer, Stage.GIVEN, looking)
    outside: list[int] = []
    own = model.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if str(get_device()) == "meta":
            return own(*args, **kwargs)
        kept.clear()
        inside.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = own(*args, **kwargs)
        outside.append(sum(kept.values()) + max(inside))
        return out

    object.__setattr__(model, "call", call)
    model.train_on_batch(*rows)
    by_layers = [e for e in sent.events if e.axes == ("model",)]
    planned = [e for e in plan.predicted.events if e.axes == ("model",)]
    sums = [sum(e.bytes for e in events) for events in (by_layers, planned)]
    return plan.activation_bytes_per_device, outside[-1], every.activation_bytes_per_device, *sums
