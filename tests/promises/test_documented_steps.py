"""Steps of the user's own, as Keras's guides write them for each framework, train as on one device."""

from __future__ import annotations

import pytest

from tests.parity.worlds import Worlds
from tests.promises.conftest import Check
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
JAX, TRACKERS, TWO = "tests.keras.jax.steps:run", "tests.parity.steps:trackers", "tests.parity.steps:two_optimizers"
FEW = [
    ("sim-jax", "dp", 3, JAX),
    ("tensorflow-4", "2x2", 1, TWO),
    ("horovod-2-tensorflow", "dp", 0, TRACKERS),
]
EVERY = [
    *FEW,
    ("tensorflow-4", "2x2", 1, TRACKERS),
    ("horovod-2-tensorflow", "dp", 0, TWO),
    *(("tensorflow-2x2", "2x2", 1, how) for how in (TRACKERS, TWO)),
]


@pytest.mark.parametrize(("setting", "kind", "zero", "program"), unless_all(FEW, EVERY))
def test_they_train_as_one_device(setting: str, kind: str, zero: int, program: str, as_alone: Check) -> None:
    as_alone(setting, kind, zero, program)


@pytest.mark.parametrize(("setting", "zero"), [("torch-4", 3), ("horovod-2", 1)])
def test_on_torch_they_train_as_one_device(setting: str, zero: int, worlds: Worlds) -> None:
    """All of them: tests/keras/torch/test_steps.py, in the simulator."""
    worlds.get(setting).call("tests.keras.torch.cases:own_steps", zero)
