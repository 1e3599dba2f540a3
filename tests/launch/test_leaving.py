"""A training under `unidist run` that is asked to end: it saves, and ends with code 75; or is started again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launch import programs
from tests.launch.runs import Done, finish, run, start, wait_until
from unidist.checkpoint.remote import directory_of
from unidist.flight.form import LEFT

pytestmark = pytest.mark.processes


def came_to(done: Done) -> list[str]:
    assert done.code == 0, done.err
    first, second = ([line for line in done.of_rank(rank) if line.startswith("came to")] for rank in (0, 1))
    assert first == second
    return first


def test_a_launcher_that_is_asked_ends_with_75(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(programs.SAVES)
    arguments = ["-n", "2", "--backend", "jax", "--grace", "30", "train.py"]
    process = start(arguments, tmp_path)
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "steps of both ranks")
    finally:
        process.send_signal(signal.SIGUSR1)
        left = finish(process)
    assert left.code == LEFT, left.err
    said = "unidist: SIGUSR1: all processes have saved and left; started again the training goes on"
    assert left.err.splitlines()[-1] == said
    # Inside of the epoch, whose end was not seen.
    steps = directory_of(tmp_path / "steps").steps()
    assert len(steps) == 1
    # Going on from there: tests/docs/test_several_machines_page.py, and below.
    assert 3 <= steps[0] < 60


def test_all_are_started_again_where_one_rank_was_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(programs.SAVES)
    done = run(["-n", "2", "--max-restarts", "1", "train.py", "asks itself"], tmp_path)
    assert came_to(done)
    lines = done.err.splitlines()
    at = lines.index("unidist: asked to leave: the processes have saved and left")
    steps = directory_of(tmp_path / "steps").steps()[0]
    assert lines[at + 1] == f"unidist: restart 1 of 1, from checkpoint {steps} ({steps} steps were made)"
    assert steps < 60
    # No step was made twice.
    assert "0.0 s in steps that were lost" in lines[-1]
    assert "in 60 steps that count" in lines[-1]
