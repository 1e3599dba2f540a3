"""Losses of Keras's inside of losses, layers, regularizers, metrics and steps are one device's on torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.inner:trained"
CASES = (
    *("both", "summed", "each and all", "each of inner", "weighed", "masked", "flat", "three deep", "around centred"),
    *("wrapped", "late", "calling", "reducing", "deep", "of calling"),
    *("endpoint", "endpoint of deep", "endpoint weighed", "endpoint and loss"),
    *("scale", "several", "batches", "custom", "remat", "weights", "activity", "lambda", "own"),
    *("two", "two calling", "two computing", "sequence", "sequence of losses", "sequence calling"),
    *("step", "step of batches", "step of weights", "step of compiled", "step of a layer", "test step"),
    *("compute_loss", "compute_metrics"),
)
# Each place where a loss may be called, with processes that send.
OF_EACH_KIND = ("each and all", "weights", "deep", "endpoint weighed", "several", "two calling", "step of compiled")
IN_TURN = [("torch-2", "dp", 3), ("sim-torch", "2x2", 1), ("torch-2", "dp", 0)]
OVER_HOROVOD = unless_all(("three deep", "endpoint", "reducing"), CASES)
PLACES = [
    *(("sim-torch", "dp", 0, case) for case in CASES),
    *unless_all(
        [(*IN_TURN[k % 3], case) for k, case in enumerate(OF_EACH_KIND)],
        [(*place, case) for place in IN_TURN for case in CASES],
    ),
    *(("horovod-2", "dp", 0, case) for case in OVER_HOROVOD),
]
# Without weights and with them in turn; a flat loss goes without.
ROWS = [(*place, k % 2 == 1 and place[3] != "flat") for k, place in enumerate(PLACES)]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda *args: alone.run("torch", RUN, None, 0, *args)


@pytest.mark.parametrize(("setting", "kind", "zero", "case", "weighted"), ROWS)
def test_it_trains_as_one_device(
    setting: str, kind: str, zero: int, case: str, weighted: bool, expected: Any, worlds: Worlds
) -> None:
    wanted = expected(case, weighted)
    for found in worlds.get(setting).call(RUN, kind, zero, case, weighted):
        same(found, wanted)
        assert found["_sent"]


@pytest.mark.parametrize("case", ["deep", "several"])
def test_programs_are_what_one_device_computes(case: str, expected: Any, worlds: Worlds) -> None:
    for found in worlds.get("torch-2").call("tests.keras.torch.promised:run", RUN, "dp", 1, case, False):
        same(found, expected(case, False))
        assert (found["_programs"], found["_unfit"]) == (4, [])
