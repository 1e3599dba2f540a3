"""Steps of one's own on torch may do with gradients and values what they do on one device, at every stage of ZeRO."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.own_steps:{}".format
CASES = (
    *("plain", "norm of all", "norm of each", "Keras's norm", "without mean", "largest", "turned", "product", "NumPy"),
    *("precise", "clamped in place", "to unit in place", "data", "by mask", "views", "set", "foreach", "finite"),
    *("one vector", "torch's norm", "torch's value", "decay", "assigned", "subtracted", "in place", "its data"),
    *("data set", "rescaled", "sharpness", "of two steps", "forgotten", "zeros", "parameters", "logged", "asked"),
    *("measuring", "inheriting", "every third", "counted", "sharpness in place"),
)
# What is wrong without a cut as well.
UNCUT = ("of two steps", "every third", "asked", "parameters", "logged", "counted")
SIMULATED = [
    *(("dp", 0, case) for case in unless_all(UNCUT, CASES)),
    *(("dp", 1 + k % 3, case) for k, case in enumerate(CASES)),
    *(("2x2", k % 4, case) for k, case in enumerate(CASES)),
]
TOGETHER = [
    ("torch-2", 3, unless_all(CASES[::3], CASES)),
    *((*place, unless_all(UNCUT, CASES)) for place in (("torch-2", 0), ("horovod-2", 1))),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda case: alone.run("torch", RUN("stepped"), None, 0, case)


@pytest.mark.parametrize(("kind", "zero", "case"), SIMULATED)
def test_in_the_simulator_it_trains_as_on_one_device(
    kind: str, zero: int, case: str, expected: Any, worlds: Worlds
) -> None:
    for found in worlds.get("sim-torch").call(RUN("stepped"), kind, zero, case):
        same(found, expected(case))
        assert found["_bytes"]
        assert bool(found["sharded"]) == (kind == "2x2" or zero > 0)


@pytest.mark.parametrize(("setting", "zero", "cases"), TOGETHER)
def test_in_processes_it_trains_as_on_one_device(
    setting: str, zero: int, cases: tuple[str, ...], expected: Any, worlds: Worlds
) -> None:
    for found in worlds.get(setting).call(RUN("all_cases"), "dp", zero, list(cases)):
        for case in cases:
            same(found[case], expected(case))
            assert found[case]["_bytes"]
