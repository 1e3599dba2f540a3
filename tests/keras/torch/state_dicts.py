"""What runs in two processes for test_state_dicts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard

import unidist

RULES = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}


def strategy(kind: str) -> Any:
    if kind.startswith("zero"):
        return unidist.DataParallel(zero=int(kind[-1]))
    mesh = unidist.Mesh({"model": 2}, (1, 0) if kind == "turned" else None)
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, RULES, uneven=True))


def model_of(kind: str, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    with strategy(kind).scope():
        layers = [keras.layers.Dense(9, activation="relu", name="up"), keras.layers.BatchNormalization(name="norm")]
        layers += [keras.layers.Dense(4, name="down")]
        model = keras.Sequential([keras.layers.Input((6,)), *layers], name="perceptron")
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def step(model: keras.Model) -> float:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(8, 4)).astype("float32")
    return float(model.train_on_batch(x, y))


def holds_dtensors(kind: str) -> None:
    model = model_of(kind, 1)
    step(model)
    found = {key.split(".")[-1]: value for key, value in model.state_dict().items()}
    wanted = unidist.gather_weights(model)
    assert set(found) == set(wanted)
    for path, value in found.items():
        assert isinstance(value, DTensor)
        np.testing.assert_array_equal(value.full_tensor().numpy(), wanted[path])
    assert any(isinstance(p, Shard) for value in found.values() for p in value.placements)
    if kind == "model":
        assert found["perceptron/up/kernel"].placements == (Shard(1),)
        assert found["perceptron/down/bias"].placements == (Replicate(),)
    kernel = next(v for v in model.weights if v.path == "perceptron/up/kernel")
    local = found[kernel.path].to_local()
    assert local.data_ptr() == kernel._storage.parameter().data_ptr()
    assert local.numel() < kernel._storage.shardings.stored.shape[0] * kernel._storage.shardings.stored.shape[1]


def moves(folder: str, source: str, target: str) -> None:
    """Written by torch.distributed.checkpoint from one layout, read into another; and straight from model to model."""
    first = model_of(source, 1)
    step(first)
    dcp.save(first.state_dict(), checkpoint_id=str(Path(folder) / f"{source}-{target}"))  # type: ignore[attr-defined]
    second = model_of(target, 2)
    step(second)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=str(Path(folder) / f"{source}-{target}"))  # type: ignore[attr-defined]
    second.load_state_dict(state)
    third = model_of(target, 3)
    third.load_state_dict(first.state_dict())
    wanted = unidist.gather_weights(first)
    for model in (second, third):
        found = unidist.gather_weights(model)
        assert set(found) == set(wanted)
        for path, value in wanted.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert abs(step(third) - step(second)) < 1e-6


def refuses_a_wrong_shape() -> str:
    model = model_of("model", 1)
    state = model.state_dict()
    key = next(key for key in state if key.endswith("up/kernel"))
    mesh = state[key].device_mesh
    state[key] = DTensor.from_local(torch.zeros(3, 3), mesh, (Replicate(),))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    return ""


def start() -> None:
    unidist.use("torch", tensor="dtensor")
