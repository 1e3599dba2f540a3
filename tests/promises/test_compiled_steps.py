"""Steps that are programs of torch keep the promises: all but the first, compared with one device's as they are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.promises import test_loops as loops
from tests.promises import test_metrics as metrics
from tests.promises import test_models_and_losses as models
from tests.promises import test_optimizers as optimizers
from tests.promises import test_tables as tables
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
RUN = "tests.keras.torch.promised:run"
PROGRAMS: list[tuple[Any, ...]] = [
    *((optimizers.optimized, name) for name in optimizers.NAMES["torch"]),
    *((models.built, name) for name in models.MODELS),
    (metrics.measured,),
    *((tables.looked_up, name) for name in ("tied", "normalized", "spectral")),
    *((program,) for program in loops.PROGRAMS["torch"]),
]
# One device, several that hold the same weights, and several that hold parts; at every stage of ZeRO.
EVERY = [
    (setting, kind, k % 4, *program)
    for k, program in enumerate(PROGRAMS)
    for setting, kind in (("torch-1", "dp"), ("torch-2", "dp"), ("torch-4", "2x2"))
    # A net of convolutions has nothing to be cut by a model axis.
    if program[0] is not loops.thawed or kind == "dp"
]
# To trace a step of four processes takes longest.
FEW = [
    ("torch-1", "dp", 3, optimizers.optimized, "adafactor"),
    ("torch-2", "dp", 2, metrics.measured),
    ("torch-2", "dp", 2, tables.looked_up, "normalized"),
    ("torch-4", "2x2", 0, optimizers.optimized, "own apply"),
]


def _named(row: tuple[Any, ...]) -> str:
    return "-".join(str(getattr(part, "__name__", part)) for part in row)


@pytest.mark.parametrize("row", unless_all(FEW, EVERY), ids=_named)
def test_they_train_as_one_device(row: tuple[Any, ...], worlds: Worlds, alone: Alone) -> None:
    setting, kind, zero, program, *args = row
    for found in worlds.get(setting).call(RUN, program, kind, zero, *args):
        assert found["_unfit"] == []
        assert found["_programs"] > 0
        same(found, alone.run("torch", program, None, 0, *args))


EMA = (optimizers.optimized, "ema at the end")


@pytest.mark.parametrize("row", unless_all([EMA], PROGRAMS), ids=_named)
def test_the_simulator_runs_them_as_they_are(row: tuple[Any, ...], worlds: Worlds, alone: Alone) -> None:
    program, *args = row
    (found,) = worlds.get("sim-torch").call(RUN, program, "dp", PROGRAMS.index(row) % 4, *args)
    assert found["_programs"] == 0
    same(found, alone.run("torch", program, None, 0, *args))
