"""What a model has beside its weights comes back from a checkpoint: metrics, seeds, low-rank and quantized kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from tests.support.sampling import unless_all

ROWS = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: None,
    "data": lambda: unidist.DataParallel(zero=3),
    "model": lambda: unidist.ModelParallel(mesh := unidist.Mesh({"model": 4}), rules(mesh)),
}


def rules(mesh: Any) -> Any:
    # A quantized kernel and a low-rank one's parts are laid out as the kernel, or are whole.
    return unidist.LayoutMap(mesh, {".*wide/kernel": (None, "model"), ".*back/kernel": ("model", None)})


def changed(model: Any, change: str) -> None:
    if change == "lora":
        for layer in model.layers:
            if isinstance(layer, keras.layers.Dense):
                layer.enable_lora(2)
    elif change:
        for layer in model.layers:
            if isinstance(layer, keras.layers.Dense):
                layer.quantize(change)


def build(name: str, change: str = "") -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    strategy = STRATEGIES[name]()

    def made() -> Any:
        wide, back = keras.layers.Dense(16, name="wide"), keras.layers.Dense(3, name="back")
        model = keras.Sequential([keras.Input((6,)), wide, keras.layers.Dropout(0.0, seed=4), back], name="net")
        changed(model, change)
        # A dropout of no rate has a seed, and draws nothing that differs by device.
        metrics = [keras.metrics.MeanAbsoluteError(name="error")]
        model.compile(keras.optimizers.Adam(0.125), "mse", metrics=metrics)
        return model

    if strategy is None:
        return made()
    with strategy.scope():
        return made()


def train(model: Any) -> Any:
    # Not a multiple of the devices' rows: the states of metrics differ by device.
    return model.fit(ROWS, ROWS[:, :3], batch_size=7, shuffle=False, verbose=0).history


def values(model: Any) -> dict[str, Any]:
    found = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return {v.path: np.asarray(keras.ops.convert_to_numpy(v.value)) for v in found}


CASES = [
    ("data", "model", ""),
    ("model", "one device", ""),
    ("one device", "data", "int8"),
    ("data", "model", "lora"),
    *unless_all([], [("model", "data", "int8"), ("model", "one device", "lora"), ("one device", "data", "")]),
]


@pytest.mark.parametrize(("writer", "reader", "change"), CASES)
def test_all_that_a_model_has_comes_back(writer: str, reader: str, change: str, tmp_path: Path) -> None:
    one = build(writer, change)
    if change != "int8":
        train(one)
    unidist.save(one, tmp_path, step=1)
    other = build(reader, change)
    if change != "int8":
        train(other)  # metrics have variables then
        other.evaluate(ROWS, ROWS[:, 1:4], verbose=0)
    unidist.restore(other, tmp_path)
    wanted, found = values(one), values(other)
    assert set(wanted) == set(found)
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    np.testing.assert_allclose(other.predict(ROWS, verbose=0), one.predict(ROWS, verbose=0), rtol=1e-5, atol=1e-5)
    if change != "int8":
        np.testing.assert_allclose(train(other)["loss"], train(one)["loss"], rtol=1e-5)


def test_metrics_go_on_where_they_were(tmp_path: Path) -> None:
    """The states of a metric are sums over the devices' parts; the checkpoint has the sum."""
    one = build("data")
    one.train_on_batch(ROWS[:7], ROWS[:7, :3])
    unidist.save(one, tmp_path, step=1)
    wanted = one.train_on_batch(ROWS[7:], ROWS[7:, :3], return_dict=True)
    for name in STRATEGIES:
        other = build(name)
        other.train_on_batch(ROWS, ROWS[:, :3])
        unidist.restore(other, tmp_path)
        found = other.train_on_batch(ROWS[7:], ROWS[7:, :3], return_dict=True)
        assert found == pytest.approx(wanted, rel=1e-5), name
