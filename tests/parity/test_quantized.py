"""float8 training on torch: weights, scales and histories of largest values are one device's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN, SIMULATED = "tests.keras.quantized:trained", "tests.keras.quantized:simulated"
CASES = ("stack", "attention", "mixing", "own step", "shared", "remat", "accumulating", "frozen", "scaled")
IN_PROCESSES = unless_all(("attention", "mixing", "accumulating"), CASES)
OVER_HOROVOD = unless_all(("attention",), CASES)
PLACES = [
    *(("torch-2", "dp", zero, case) for zero in unless_all((3,), (0, 3)) for case in IN_PROCESSES),
    *(("torch-4", "found 2x2", 0, case) for case in unless_all(("attention",), CASES)),
    *(("horovod-2", "dp", zero, case) for zero in unless_all((0,), (0, 3)) for case in OVER_HOROVOD),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda name: alone.run("torch", RUN, None, 0, name)


def compare(found: Any, wanted: Any) -> None:
    same(found, wanted)
    assert found["_sent"]
    assert not found["_gathered"], "what is largest was looked for in gathered rows"
    assert any(value != 1 for path, value in wanted["weights"].items() if path.endswith("_scale"))


# Three devices have unequal rows and shards, and do with whole values what they do with stored ones.
AT_ONCE = {"attention": ((2, 0), (3, 0)), "accumulating": ((2, 0),)}
IN_THE_SIMULATOR = [
    (case, devices, zero)
    for case in CASES
    for devices, zero in (*unless_all(AT_ONCE.get(case, ()), ((2, 0), (3, 0))), (3, 3))
]


@pytest.mark.parametrize(("case", "devices", "zero"), IN_THE_SIMULATOR)
def test_it_trains_as_one_device_in_the_simulator(
    case: str, devices: int, zero: int, expected: Any, worlds: Worlds
) -> None:
    compare(worlds.get("sim-torch").call(SIMULATED, devices, "dp", zero, case)[0], expected(case))


@pytest.mark.parametrize("case", unless_all(("attention", "own step"), CASES))
def test_it_trains_as_one_device_where_layouts_are_found(case: str, expected: Any, worlds: Worlds) -> None:
    compare(worlds.get("sim-torch").call(RUN, "found 2x2", 0, case)[0], expected(case))


@pytest.mark.parametrize(("setting", "kind", "zero", "case"), PLACES)
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, case: str, expected: Any, worlds: Worlds) -> None:
    for found in worlds.get(setting).call(RUN, kind, zero, case):
        compare(found, expected(case))
