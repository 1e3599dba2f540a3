"""Some cells of the table of faults (ci/faults.py has all): the run ends with the numbers of an undisturbed one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import sampling
from tests.support.hosts import why_not
from tests.surviving.cells import run
from tests.surviving.table import Cell, in_memory, sample

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
# One a backend: each is a run from nothing, a restart and its reference. `ci/faults.py` runs the whole table.
COUNT = 4
# tests/launch/test_run.py has it. The usual draw stays, for ci/covered.toml names two of its cells.
WITHOUT = ("exit 0",)
# Those of torch train without dropout, as one must whose node is lost: they have one reference.
CELLS = [replace(cell, dropout=cell.backend != "torch") for cell in sample(COUNT, sampling.SEED, ("2",), WITHOUT)]
IN_MEMORY = Cell("SIGKILL", "copying", "torch", "2", in_memory=True)
NO_HOSTS = why_not()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_run_to_which_something_happens(cell: Cell, tmp_path: Path) -> None:
    outcome = run(cell, tmp_path)
    assert not outcome.wrong, "\n".join([f"{cell}", *outcome.wrong, *outcome.lines])


def test_a_run_that_goes_on_from_memory(tmp_path: Path) -> None:
    assert IN_MEMORY in in_memory("torch", "2")
    outcome = run(replace(IN_MEMORY, dropout=False), tmp_path)
    assert not outcome.wrong, "\n".join([*outcome.wrong, *outcome.lines])


@pytest.mark.skipif(bool(NO_HOSTS), reason=f"two hosts cannot be made here: {NO_HOSTS}")
def test_a_node_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    outcome = run(Cell("node back", "between steps", "torch", "two hosts", dropout=False), tmp_path)
    assert not outcome.wrong, "\n".join([*outcome.wrong, *outcome.lines])


@pytest.mark.skipif(bool(NO_HOSTS), reason=f"two hosts cannot be made here: {NO_HOSTS}")
def test_a_link_that_is_cut_and_mended(tmp_path: Path) -> None:
    outcome = run(Cell("link cut", "between steps", "torch", "two hosts", dropout=False), tmp_path)
    assert not outcome.wrong, "\n".join([*outcome.wrong, *outcome.lines])
