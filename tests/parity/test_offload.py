"""Slots that rest in the host's memory change no number: training equals one device, and goes on from either place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.compare import assert_same_logs, assert_same_values
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, MODEL_2, Alone, Worlds
from tests.support.sampling import each_value

pytestmark = pytest.mark.processes

_CASES = ("mlp_ragged_adam", "mlp_clipped", "tagger")
_EVERY = [
    (setting, replace(spec, zero=zero), case)
    for setting, spec in (("torch-2", DATA_2), ("torch-4", GRID), ("sim-torch", DATA_4), ("sim-torch", GRID))
    for zero in (0, 1, 3)
    for case in _CASES
]
_TRAININGS = [
    # Each mesh at each stage, and each setting with each case.
    *each_value(_EVERY, lambda row: (row[:2], row[::2])),
    ("torch-2", MODEL_2, "tagger"),
    ("horovod-2", replace(DATA_2, zero=1), "mlp_clipped"),
]


@pytest.mark.parametrize(
    ("setting", "spec", "case"), _TRAININGS, ids=lambda p: p.name if isinstance(p, Spec) else str(p)
)
def test_it_trains_as_one_device(setting: str, spec: Spec, case: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.train("torch", case)
    for result in worlds.train(setting, case, replace(spec, offload="states")):
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)
        assert_same_logs([result.evaluate], [wanted.evaluate])
        assert sum(sent for _, sent in result.traffic.values()) > 0


@pytest.mark.parametrize(
    ("setting", "spec"), [("torch-2", replace(DATA_2, zero=1)), ("torch-4", replace(GRID, zero=3))]
)
def test_training_goes_on_from_what_rested_elsewhere(setting: str, spec: Spec, worlds: Worlds, tmp_path: Path) -> None:
    world = worlds.get(setting)
    there = replace(spec, offload="states")
    for before, after in ((spec, there), (there, spec)):
        directory = tmp_path / before.name
        (first, *_) = world.call("tests.parity.offload:start_or_go_on", before, directory, False)
        again = [world.call("tests.parity.offload:start_or_go_on", one, directory, True)[0] for one in (before, after)]
        assert_same_values(again[1].values, again[0].values)
        rested, plain = (again[1], again[0]) if after is there else (again[0], again[1])
        assert (plain.on_host, plain.brought) == (0, 0)
        assert rested.on_host + rested.slots == plain.slots
        assert rested.on_host > 0.9 * plain.slots
        assert rested.brought > 0
        assert rested.away == 0
        assert first.away == 0


@pytest.mark.parametrize("setting", ["sim-jax", "sim-tensorflow"])
def test_other_frameworks_refuse_it(setting: str, worlds: Worlds) -> None:
    with pytest.raises(Exception, match=r"CapabilityError: offload='states': with Keras on '.*Use zero=1"):
        worlds.get(setting).call("tests.parity.offload:refused")
