"""Some cells of the table of faults (ci/faults.py has all): the run ends with the numbers of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sampling
from tests.support.hosts import why_not
from tests.surviving.cells import run
from tests.surviving.table import BACK, Cell, sample

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
# Each is a run from nothing, a restart and its reference. JAX is started again in tests/launch/test_restarts.py, torch
# below; `ci/faults.py` runs the whole table.
FEW = [Cell("SIGTERM", "between steps", "horovod", "2"), Cell("SIGKILL", "forward", "tensorflow", "2")]
# tests/launch/test_run.py has it.
WITHOUT = ("exit 0",)
CELLS = FEW if sampling.SEED == sampling.USUAL and not sampling.WHOLE else sample(4, sampling.SEED, ("2",), WITHOUT)
NO_HOSTS = why_not()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_run_to_which_something_happens(cell: Cell, tmp_path: Path) -> None:
    outcome = run(cell, tmp_path)
    assert not outcome.wrong, "\n".join([f"{cell}", *outcome.wrong, *outcome.lines])


@pytest.mark.skipif(bool(NO_HOSTS), reason=f"two hosts cannot be made here: {NO_HOSTS}")
def test_a_node_that_is_lost_amid_a_copy_and_comes_back(tmp_path: Path) -> None:
    """The other goes on from a step in its own memory, and alone."""
    outcome = run(Cell(BACK, "copying", "torch", "two hosts", in_memory=True, dropout=False), tmp_path)
    assert not outcome.wrong, "\n".join([*outcome.wrong, *outcome.lines])


@pytest.mark.skipif(bool(NO_HOSTS), reason=f"two hosts cannot be made here: {NO_HOSTS}")
def test_a_link_that_is_cut_and_mended(tmp_path: Path) -> None:
    outcome = run(Cell("link cut", "between steps", "torch", "two hosts", dropout=False), tmp_path)
    assert not outcome.wrong, "\n".join([*outcome.wrong, *outcome.lines])
