"""What the processes of the tests run. Each function returns plain values for the test to compare."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np

import unidist
from tests.keras.jax.models import BATCH, CASES, PAIR, compile_case
from tests.keras.jax.worlds import is_first
from unidist.backends import registry

Result = dict[str, Any]


def strategy(kind: str | None, rules: Any = PAIR, **options: Any) -> Any:
    """None: no distribution; "dp": all data; "mp": all model; "2x2"; "2x2 across": the model axis spans processes."""
    if kind is None:
        return None
    if kind == "dp":
        return unidist.DataParallel(**options)
    shape = {"model": 4} if kind == "mp" else {"data": 2, "model": 2}
    mesh = unidist.Mesh(shape, [0, 2, 1, 3] if kind == "2x2 across" else [0, 1, 2, 3])
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules), **options)


def scope(distribution: Any) -> Any:
    return contextlib.nullcontext() if distribution is None else distribution.scope()


def fresh() -> None:
    """Names and seeds as at a program's start; other seeds in the other processes, which the scope must align."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7 if is_first() else 1234)


def made(name: str, optimizer: str = "momentum", **options: Any) -> Any:
    model = CASES[name].build()
    compile_case(model, CASES[name], optimizer, **options)
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


def train(name: str, optimizer: str, kind: str | None, **options: Any) -> Result:
    """Five batches, the last ragged, then evaluate and predict with batches that do not divide."""
    fresh()
    data = CASES[name].data()
    with scope(strategy(kind, CASES[name].rules)):
        model = made(name, optimizer, **options)
        history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=True, verbose=0).history
        scored = {key: value for key, value in data.items() if key != "class_weight"}
        evaluated = model.evaluate(**scored, batch_size=5, verbose=0, return_dict=True)
        predicted = model.predict(data["x"], batch_size=9, verbose=0)
        return {"history": history, "evaluate": evaluated, "predict": predicted, **told(model)}
