"""Sharded gradients, optimizer states and values (ZeRO 1 to 3) change no number: training equals one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.compare import assert_same_arrays, assert_same_logs, assert_same_values
from tests.parity.models import CASES
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, Alone, Worlds
from tests.support.sampling import pairwise, unless_all

pytestmark = pytest.mark.processes

# Stages 1 and 2 are the same layouts (tests/unit/test_strategies.py).
_SOME = ("mlp_ragged_adam", "tagger", "contrast")
# Masks of places whose rows are cut; whichever pairs are drawn.
_ALWAYS = ("sim-torch", DATA_4, 1, "tagger")
_IN_ONE = [("sim-torch", spec, zero, case) for spec in (DATA_4, GRID) for zero in (1, 3) for case in CASES]
_TRAININGS = [
    *dict.fromkeys([_ALWAYS, *pairwise(_IN_ONE)]),
    *(("torch-2", DATA_2, zero, case) for zero in (1, 3) for case in _SOME),
    *pairwise([("torch-4", spec, zero, case) for spec in (DATA_4, GRID) for zero in (2, 3) for case in _SOME]),
]


@pytest.mark.parametrize(
    ("setting", "spec", "zero", "case"), _TRAININGS, ids=lambda p: p.name if isinstance(p, Spec) else str(p)
)
def test_every_stage_trains_as_one_device(
    setting: str, spec: Spec, zero: int, case: str, alone: Alone, worlds: Worlds
) -> None:
    wanted = alone.train("torch", case)
    for result in worlds.train(setting, case, replace(spec, zero=zero)):
        assert_same_values(result.start, wanted.start, 0.0)
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)
        assert_same_logs([result.evaluate], [wanted.evaluate])
        assert_same_values(result.predict, wanted.predict)
        for op in ("reduce_scatter", "all_gather"):
            assert result.traffic[op][1] > 0
        slots = [row for row in result.variables if row.path not in result.weights and len(row.shape) > 1]
        assert slots
        assert all(row.is_sharded for row in slots)
        trained = [row for row in result.variables if row.path in result.weights and len(row.shape) > 1]
        if zero == 3:
            assert all("data" in row.layout for row in trained)
        else:
            assert not any("data" in row.layout for row in trained)


@pytest.mark.parametrize("zero", [1, 3])
def test_tensors_that_move_by_themselves_train_as_one_device(zero: int, alone: Alone, worlds: Worlds) -> None:
    case, spec = "mlp_ragged_adam", replace(DATA_2, zero=zero)
    wanted, packed = alone.train("torch", case), worlds.train("torch-2", case, spec)[0]
    for result in worlds.get("torch-2").call("tests.parity.train:train_loosely", case, spec):
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)
        for op in ("reduce_scatter", "all_gather"):
            assert result.traffic[op][0] > packed.traffic[op][0]


@pytest.mark.parametrize(
    # Stage 2 is stage 1 there, and the grid at stage 1 trains in tests/promises.
    ("spec", "zero"),
    unless_all([(DATA_4, 1), (DATA_4, 3), (GRID, 3)], [(s, z) for s in (DATA_4, GRID) for z in (1, 2, 3)]),
    ids=lambda p: getattr(p, "name", p),
)
def test_every_stage_on_dtensor(spec: Spec, zero: int, alone: Alone, worlds: Worlds) -> None:
    """Of full batches: a ragged one, which test_tensorflow.py has at stage 3, would be traced once more."""
    case = "mlp"
    wanted = alone.train("tensorflow", case)
    assert len(wanted.logs) >= 5
    plain, found = (worlds.train("tensorflow-4", case, replace(spec, zero=stage))[0] for stage in (0, zero))
    assert_same_values(found.start, wanted.start, 0.0)
    assert_same_logs(found.logs, wanted.logs)
    assert_same_values(found.weights, wanted.weights)
    assert_same_values(found.predict, wanted.predict)
    before = {row.path: row.bytes_per_device for row in plain.variables}
    shards = spec.size("data")
    for row, path in zip(found.variables, before, strict=True):
        is_spread = "data" in row.layout
        assert row.bytes_per_device * (shards if is_spread else 1) == before[path]
        is_weight = row.path in found.weights
        if len(row.shape) > 1:
            assert is_spread == (zero == 3 or not is_weight), row
    # Values are gathered besides: on CPU by all-reduces of parts with zeros around them.
    assert found.traffic["all_reduce"][1] > plain.traffic["all_reduce"][1] > 0


def test_an_optimizer_on_dtensor_reads_the_parts_that_it_updates(worlds: Worlds) -> None:
    """Averages are made of values that the update has changed: gathered, they would be sent once more."""
    without, averaged = worlds.get("tensorflow-4").call("tests.parity.interplay:averages")[0]
    assert averaged == without > 0


def test_a_stopped_run_goes_on_under_another_mesh_and_stage(alone: Alone, worlds: Worlds, tmp_path_factory) -> None:
    """Saved by two processes at stage 3, gone on with by four at stage 1, by the simulator, and by one device."""
    case, folder = "mlp_ragged_adam", str(tmp_path_factory.mktemp("zero"))
    saved = worlds.get("torch-2").call("tests.parity.train:save", case, replace(DATA_2, zero=3), folder)
    wanted = alone.world("torch").call("tests.parity.train:load_and_go_on", case, None, folder)[0]
    assert_same_arrays(wanted.start, saved[0].weights, 0.0)
    assert_same_arrays(wanted.start, alone.train("torch", case).weights)
    for setting, spec in (("torch-4", replace(GRID, zero=1)), ("sim-torch", replace(DATA_4, zero=3))):
        for result in worlds.get(setting).call("tests.parity.train:load_and_go_on", case, spec, folder):
            assert_same_arrays(result.start, saved[0].weights, 0.0)
            assert_same_logs(result.logs, wanted.logs)
            assert_same_values(result.weights, wanted.weights)
            assert result.traffic["reduce_scatter"][1] > 0
