"""Runs of a model that processes of the tests make, on every backend: their strategies and their records."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras
import numpy as np

import unidist
from tests.support.clearing import cleared
from unidist.backends import registry

Result = dict[str, Any]
PAIR: dict[str, tuple[str | None, ...]] = {
    ".*column/kernel": (None, "model"),
    ".*column/bias": ("model",),
    ".*row/kernel": ("model", None),
}


def strategy(kind: str | None, rules: Any = PAIR, **options: Any) -> Any:
    """None: no distribution; "dp": all data; "mp": all model; "2x2"; "2x2 across": the model axis spans processes;
    "found": all model, without rules."""
    if kind is None:
        return None
    if kind == "dp":
        return unidist.DataParallel(**options)
    if kind == "found":
        return unidist.ModelParallel(unidist.Mesh({"model": len(unidist.list_devices())}), **options)
    shape = {"model": 4} if kind == "mp" else {"data": 2, "model": 2}
    mesh = unidist.Mesh(shape, [0, 2, 1, 3] if kind == "2x2 across" else [0, 1, 2, 3])
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules), **options)


def is_first() -> bool:
    return os.environ.get("JAX_PROCESS_ID", os.environ.get("RANK", "0")) == "0"


def scope(distribution: Any) -> Any:
    return contextlib.nullcontext() if distribution is None else distribution.scope()


def fresh() -> None:
    """Names and seeds as at a program's start; other seeds in the other processes, which the scope must align."""
    cleared()
    keras.utils.set_random_seed(7 if is_first() else 1234)


def made_ready(model: Any) -> Any:
    """On TensorFlow a step that builds its optimizer is traced twice; Keras leaves it to the first. (So it is for one
    model of tests/parity/train.py.) DTensor's driver builds it before."""
    if keras.config.backend() == "tensorflow" and model.built and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def told(model: Any) -> Result:
    chosen = registry.has_current()  # on one device nobody chooses, and TensorFlow could not be given more any more
    return {
        "weights": unidist.gather_weights(model) if chosen else {v.path: np.asarray(v) for v in model.weights},
        "slots": [np.asarray(v) for v in model.optimizer.variables],
        "sharded": sorted(row.path for row in unidist.describe(model).rows if row.is_sharded) if chosen else [],
        "spread": max(
            (len(v.value.sharding.device_set) for v in model.variables if hasattr(v.value, "sharding")), default=0
        ),
    }
