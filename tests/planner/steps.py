"""Steps of training in the simulator, and what autograd keeps in them."""

from __future__ import annotations

from typing import Any

import keras
import keras_hub
import numpy as np

import unidist
from tests.planner.zoo import backbone, batch
from tests.support.saving import saved_bytes
from unidist.keras.patching.compat import get_device

BATCH, LENGTH = 6, 24
MESHES = {"one": {"data": 1}, "data": {"data": 2}, "model": {"model": 2}}


def convolutions() -> Any:
    layers = keras.layers
    first = [layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(32, 3, activation="relu")]
    return keras.Sequential([keras.Input((24, 24, 3)), *first, layers.GlobalAveragePooling2D(), layers.Dense(4)])


def recurrent() -> Any:
    return keras.Sequential([keras.Input((None, 8)), keras.layers.LSTM(32, dropout=0.3), keras.layers.Dense(4)])


def mixtral() -> Any:
    heads = {"num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}
    return keras_hub.models.MixtralBackbone(64, 2, **heads, num_experts=4, top_k=2)


OTHERS = {"convolutions": convolutions, "recurrent": recurrent, "mixtral": mixtral}


def kept_in_a_step(name: str, kind: str) -> tuple[int, int]:
    """Planned bytes of activations, and those that autograd keeps of the model's call on a device."""
    mesh = MESHES[kind]
    unidist.use("sim", devices=next(iter(mesh.values())))
    model = OTHERS[name]() if name in OTHERS else backbone(name, **({"dropout": 0.1} if name != "llama" else {}))
    planned = unidist.plan(model, unidist.Mesh(mesh), batch=BATCH, sequence=LENGTH).activation_bytes_per_device
    strategy = unidist.ModelParallel if kind == "model" else unidist.DataParallel
    unidist.parallelize(model, strategy(unidist.Mesh(mesh)))
    kept: list[int] = []
    own = model.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if str(get_device()) == "meta":
            return own(*args, **kwargs)
        out, found = saved_bytes(lambda: own(*args, **kwargs), [x for v in model.variables for x in parameters(v)])
        kept.append(found)
        return out

    object.__setattr__(model, "call", call)
    model.compile("sgd", keras.tree.map_structure(lambda out: mean, outputs(model)))
    y = keras.tree.map_structure(lambda out: np.zeros((BATCH, 1), "float32"), outputs(model))
    given = batch(model, BATCH, LENGTH) if name not in ("convolutions", "recurrent") else random_rows(model)
    model.fit(given, y, batch_size=BATCH, epochs=2, verbose=0)
    return planned, kept[-1]


def outputs(model: Any) -> Any:
    return dict.fromkeys(model.output, 0) if isinstance(getattr(model, "output", None), dict) else 0


def mean(y: Any, p: Any) -> Any:
    return keras.ops.mean(p)


def parameters(variable: Any) -> Any:
    storage = getattr(variable, "_storage", None)
    return [variable.value] if storage is None else storage.parameters()


def random_rows(model: Any) -> Any:
    shape = [LENGTH if n is None else n for n in model.input_shape[1:]]
    return np.random.default_rng(0).normal(size=(BATCH, *shape)).astype("float32")
