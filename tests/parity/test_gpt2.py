"""Twenty steps of Adam on a transformer end in one device's weights, at every stage of ZeRO on every adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parity.compare import assert_same_values, moved
from tests.parity.gpt2 import CASE, Trained
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, SETTINGS, Alone, Worlds
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

_TRAININGS = [
    # One engine: each stage on one of its adapters, and on torch all.
    *(("sim-torch", DATA_4, zero) for zero in unless_all((0,), (0, 1, 2, 3))),
    *(("torch-2", DATA_2, zero) for zero in unless_all((3,), (0, 1, 2, 3))),
    *unless_all((), (("torch-4", DATA_4, 2), ("sim-torch", GRID, 3))),
    ("torch-4", GRID, 3),
    *(("horovod-2", DATA_2, zero) for zero in unless_all((1,), (0, 1, 2, 3))),
    # Where a training compiles for seconds; every stage of a smaller model: tests/keras/jax/test_zero.py, test_zero.py.
    *(("jax-4", DATA_4, zero) for zero in unless_all((), (0, 1, 2, 3))),
    ("jax-4", GRID, 3),
    *(("tensorflow-4", DATA_4, zero) for zero in unless_all((), (0, 1, 3))),
    ("tensorflow-4", GRID, 3),
]


@pytest.fixture(scope="module")
def wanted(alone: Alone) -> dict[str, Trained]:
    found = {keras: alone.world(keras).call("tests.parity.gpt2:train", None)[0] for keras in ("torch", "jax")}
    found["tensorflow"] = alone.world("tensorflow").call("tests.parity.gpt2:train_where_it_divides", None)[0]
    return found


@pytest.mark.parametrize(
    ("setting", "spec", "zero"), _TRAININGS, ids=lambda p: p.name if isinstance(p, Spec) else str(p)
)
def test_gpt2_ends_in_one_devices_weights(
    setting: str, spec: Spec, zero: int, wanted: dict[str, Trained], worlds: Worlds
) -> None:
    keras = SETTINGS[setting].keras
    one = wanted[keras]
    assert len(one.losses) == CASE.steps == 20
    assert moved(one.start, one.weights) > 0.01
    train = "train_where_it_divides" if keras == "tensorflow" else "train"
    for found in worlds.get(setting).call(f"tests.parity.gpt2:{train}", replace(spec, zero=zero)):
        assert_same_values(found.start, one.start, 0.0)
        np.testing.assert_allclose(found.losses, one.losses, atol=1e-5, rtol=1e-5)
        assert_same_values(found.weights, one.weights)
        assert sum(count for count, _ in found.traffic.values()) >= CASE.steps
        if zero and keras != "tensorflow":  # whose DTensor reduces whole gradients
            assert found.traffic["reduce_scatter"][1] > 0
        rows = {row.path: row for row in found.variables}
        kernels = [row for path, row in rows.items() if path in one.weights and path.endswith("kernel")]
        slots = [row for path, row in rows.items() if path not in one.weights and path.endswith("kernel_velocity")]
        assert len(slots) == len(kernels) > 0
        assert all(("data" in row.layout) == (zero > 0) for row in slots)
        assert all(("data" in row.layout) == (zero == 3) for row in kernels)
