"""Steps of one's own on torch may compute losses, numbers for the logs and gradients of inputs by hand, of any rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.own_rows:{}".format
CASES = (
    *("squares", "weighted", "masked", "square of a loss", "penalty", "norms", "likeness", "two batches"),
    *("by the rows", "by the length", "halves", "two batches of rows", "two batches that mix", "mixed up", "noisy"),
    *("attacked", "attacked behind", "smooth", "quantized", "later", "asked", "tested", "of wholes", "extremes"),
    "measuring",
)
STAGES = [("dp", 0), ("2x2", 1), ("dp", 3), ("2x2", 3)]
EVERY = [(*stage, case) for case in CASES for stage in STAGES]
FEW = [(*STAGES[k % len(STAGES)], case) for k, case in enumerate(CASES)]
# What differs between a process and a virtual rank: generators, batches cut or read apart, threads of gradients.
IN_HOROVOD = ("halves", "two batches that mix", "noisy", "smooth", "tested", "measuring")
TOGETHER = [(*place, unless_all(IN_HOROVOD, CASES)) for place in (("torch-2", 0), ("torch-2", 3), ("horovod-2", 1))]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda case: alone.run("torch", RUN("stepped"), None, 0, case)


@pytest.mark.parametrize(("kind", "zero", "case"), unless_all(FEW, EVERY))
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


def test_what_each_process_draws_by_itself_is_the_same(expected: Any, worlds: Worlds) -> None:
    """torch's and NumPy's generators, in a step that looks at the rows of all devices."""
    for case in ("drawn", "drawn late"):
        for setting in ("torch-2", "sim-torch"):
            for found in worlds.get(setting).call(RUN("stepped"), "dp", 0, case):
                same(found, expected(case))


def test_generators_that_are_apart_when_a_step_begins_to_draw_are_an_error(worlds: Worlds) -> None:
    for refusal in worlds.get("torch-2").call(RUN("refused"), "dp", 0, "drawn later"):
        assert refusal.startswith("DesyncError: the generators that a step draws from differ between the processes")
