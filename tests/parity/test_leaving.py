"""A training with one process that is asked to end: all save at the same step and end, and started again they give the
numbers of one that nobody asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_going_on import assert_went_on, call
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, Alone, Worlds
from tests.support.sampling import unless_all
from unidist.checkpoint.remote import directory_of

pytestmark = pytest.mark.processes

# Who is asked, where, and from where the training goes on. An epoch has six batches.
INSIDE, LAST, VALIDATING = ((1, 3), (1, 4), 10), ((0, 5), (1, 0), 6), ((0, -2), (1, 0), 6)
PLACES: list[tuple[str, Spec | None, str, int, Any]] = [
    ("torch-alone", None, "arrays", 0, INSIDE),
    ("torch-alone", None, "DataLoader", 0, LAST),
    ("torch-alone", None, "PyDataset", 0, VALIDATING),
    ("sim-torch", DATA_4, "arrays", 0, INSIDE),
    ("torch-2", DATA_2, "arrays", 1, INSIDE),
    ("torch-2", DATA_2, "PyDataset", 1, VALIDATING),
    ("horovod-2", DATA_2, "arrays", 1, INSIDE),
    # Each of its trainings traces for seconds, and what it exchanges is what Horovod does on torch too.
    *unless_all([], [("horovod-2-tensorflow", DATA_2, "tf.data", 1, INSIDE)]),
    ("jax-2x2", GRID, "arrays", 1, INSIDE),
    ("tensorflow-2x2", GRID, "PyDataset", 1, INSIDE),
]


@pytest.mark.parametrize(
    ("setting", "spec", "source", "asked", "where"),
    PLACES,
    ids=[f"{setting}-{where[0]}" for setting, _, _, _, where in PLACES],
)
def test_all_save_and_leave_at_one_step(
    setting: str, spec: Spec | None, source: str, asked: int, where: Any, alone: Alone, worlds: Worlds, tmp_path: Path
) -> None:
    run, (stop, goes_on, total) = call(setting, alone, worlds), where
    options: dict[str, Any] = {"dropout": 0.0, "epochs": 2, "validate": where is VALIDATING}
    # What is written beside the training when it is asked is written to its end.
    saves = {"every": 3, "checkpoint": {"asynchronous": True}} if spec is DATA_2 else {"every": 100}
    whole = run(spec, source, None, **options)[0]
    for left in run(spec, source, str(tmp_path), stop, asked=asked, **saves, **options):
        assert left.raised == "SystemExit 75"
    assert directory_of(tmp_path).latest() == total
    for found in run(spec, source, str(tmp_path), **options):
        assert_went_on(found, whole, goes_on)
        assert found.resumed == total


def test_asked_behind_the_last_step_it_leaves_when_all_is_saved(worlds: Worlds, alone: Alone, tmp_path: Path) -> None:
    run, options = call("torch-2", alone, worlds), {"dropout": 0.0, "epochs": 2, "validate": True}
    # After a short epoch nobody looks when one ends.
    for left in run(DATA_2, "arrays", str(tmp_path), (1, -2), asked=1, **options):
        assert left.raised == "SystemExit 75"
    for found in run(DATA_2, "arrays", str(tmp_path), **options):
        assert (found.raised, found.steps, found.epochs, found.resumed) == ("", [], [0, 1], 12)
