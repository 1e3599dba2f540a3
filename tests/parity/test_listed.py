"""Programs whose code sees the whole batch are one device's, on each number of devices and under each strategy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import WHOLE

pytestmark = pytest.mark.processes

RUN = "tests.keras.listed:trained"
PROGRAMS = (
    *("two losses in a function", "losses in a loss's call", "a loss's own __call__", "endpoint"),
    *("a loss in the output", "a metric in a metric", "distiller", "quarters", "frozen and freed", "float8"),
    *("graphs", "low rank"),
)
SETTINGS = (*(("sim-torch", 2), ("sim-torch", 3), ("torch-2", 2), ("torch-3", 3), ("horovod-2", 2), ("horovod-3", 3)),)
STRATEGIES = (("dp", 0), ("dp", 3), ("found", 0))
ROWS = [
    (*setting, *strategy, program)
    for setting in SETTINGS
    for t, strategy in enumerate(STRATEGIES)
    for p, program in enumerate(PROGRAMS)
    # Tests of losses, trainers, float8 and graphs have two processes, and four virtual devices.
    if WHOLE or (setting == ("sim-torch", 3) and p % 3 == t)
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda program: alone.run("torch", RUN, 1, program, None)


@pytest.mark.parametrize(("setting", "devices", "kind", "zero", "program"), ROWS)
def test_it_trains_as_one_device(
    setting: str, devices: int, kind: str, zero: int, program: str, expected: Any, worlds: Worlds
) -> None:
    for found in worlds.get(setting).call(RUN, devices, program, kind, zero):
        same(found, expected(program))
        assert found["_sent"]
        assert kind != "found" or found.get("sharded", True)
