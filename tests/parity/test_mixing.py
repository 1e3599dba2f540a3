"""Rows that look at each other: losses, layers, operations and added losses of all rows are one device's on torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import each_value, unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.mixing:mixed"
CASES = (
    *("contrastive", "supervised", "total", "masked mean", "centred", "dice", "Keras's own", "alone"),
    *("sampling", "center", "ranked", "neighbour", "experts", "operations", "filtering", "own"),
    *("penalty", "functions", "time", "pairs", "helper", "batch", "attending"),
)
# Over Horovod with Keras on TensorFlow losses see whole batches, and what halves their rows is refused.
# The others are known and tried by what torch knows them by, above.
ON_TENSORFLOW = unless_all(
    ("experts", "operations", "own", "penalty", "functions", "summing", "counting", "deciding", "batch", "measuring"),
    (
        *("center", "neighbour", "experts", "operations", "own", "penalty", "functions", "time", "helper"),
        *("summing", "counting", "deciding", "batch", "measuring"),
    ),
)
FIRST = ("sim-torch", "dp", 0)
PLACES = [
    *(("sim-torch", kind, zero) for kind in ("dp", "2x2") for zero in (0, 1, 3) if (kind, zero) != ("dp", 0)),
    *(("torch-2", "dp", zero) for zero in (0, 3)),
    ("torch-4", "2x2", 1),
    ("horovod-2", "dp", 0),
]
# Processes and Horovod run the engine that the simulator runs: each case is once in it, and once elsewhere.
ROWS = [
    *((*FIRST, case, False) for case in CASES),
    *each_value(
        [(*place, case, weighted) for place in PLACES for case in CASES for weighted in (False, True)],
        lambda row: (row[:3], row[3], (row[0], row[4])),
    ),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda *args: alone.run("torch", RUN, None, 0, *args)


@pytest.fixture(scope="module")
def sending(worlds: Worlds) -> Any:
    """What of a case looks at several rows, by name."""

    def names(case: str) -> set[str]:
        mixing = worlds.get("sim-torch").call("tests.keras.mixing:mixing_of", case)[0]
        # Noise is drawn for all rows and looks at none. Losses and steps have no name; an operation may leave sums
        # apart.
        return {name for name in mixing if "/" in name and not name.startswith("activity ")} - {"stack/sampling"}

    return cache(names)


def given_all_rows(found: Any) -> set[str]:
    return {name for name, why in found["_why"].items() if why.startswith("given the rows")}


@pytest.mark.parametrize(("setting", "kind", "zero", "case", "weighted"), ROWS)
def test_it_trains_as_one_device(
    setting: str, kind: str, zero: int, case: str, weighted: bool, expected: Any, sending: Any, worlds: Worlds
) -> None:
    wanted = expected(case, weighted)
    for found in worlds.get(setting).call(RUN, kind, zero, case, weighted):
        same(found, wanted)
        if setting == "torch-2" or (setting, kind, zero) == FIRST:
            assert given_all_rows(found) >= sending(case)


@pytest.mark.parametrize("case", ON_TENSORFLOW)
def test_on_tensorflow_over_horovod_it_trains_as_one_device(case: str, alone: Alone, worlds: Worlds) -> None:
    world = worlds.get("horovod-2-tensorflow")
    mixing = world.call("tests.keras.mixing:mixing_of", case)[0]
    # A ragged batch is traced once more.
    how = case, True, *unless_all((22 if case == "own" else 16,), ())
    wanted = alone.run("tensorflow", RUN, None, 0, *how)
    for found in world.call(RUN, "dp", 0, *how):
        same(found, wanted)
        assert found["_mixing"], mixing
        assert given_all_rows(found) or mixing == {"activity regularizer of stack/dense"}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("pairs", "looks at several rows and gives another number of them"),
        ("sequence", "the model's outputs: there are 8 rows where this process has 4"),
    ],
)
def test_what_gives_other_rows_is_refused_on_tensorflow_over_horovod(case: str, text: str, worlds: Worlds) -> None:
    outcomes = worlds.get("horovod-2-tensorflow").outcomes(RUN, "dp", 0, case, False)
    for outcome in outcomes.values():
        assert outcome.failure is not None
        assert "CapabilityError" in str(outcome.failure)
        assert text in str(outcome.failure)


@pytest.mark.parametrize(("setting", "zero"), [("sim-torch", 0), ("torch-2", 3)])
def test_a_loss_may_need_more_rows_than_a_process_has(setting: str, zero: int, alone: Alone, worlds: Worlds) -> None:
    """Keras traces it before the first step, with the rows of all."""
    wanted = alone.run("torch", "tests.keras.alike:mined", None, 0)
    for found in worlds.get(setting).call("tests.keras.alike:mined", "dp", zero):
        same(found, wanted)


def test_a_constant_is_no_batch(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("torch", "tests.keras.mixing:table_beside", None, 0)
    for found in worlds.get("sim-torch").call("tests.keras.mixing:table_beside", "dp", 0):
        same(found, wanted)


@pytest.mark.parametrize(
    ("zero", "program", "args", "count"),
    [
        (0, RUN, ("center", False), 6),
        *((zero, "tests.keras.mixing:centred_by_its_call", (), 2) for zero in (1, 3)),
    ],
)
def test_a_program_of_what_mixes_is_one_devices(
    zero: int, program: str, args: tuple[Any, ...], count: int, alone: Alone, worlds: Worlds
) -> None:
    wanted = alone.run("torch", program, None, 0, *args)
    for found in worlds.get("torch-2").call("tests.keras.torch.promised:run", program, "dp", zero, *args):
        same(found, wanted)
        assert (found["_programs"], found["_unfit"]) == (count, [])
