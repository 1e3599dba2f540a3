"""When a run is started again, with which error it ends, and what its time was spent on: made-up attempts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unidist.flight.form import PHASES
from unidist.flight.reading import Flight
from unidist.launch.goodput import Spent, spent
from unidist.launch.request import Request
from unidist.launch.restarts import FRUITLESS, Again, GivenUp, Restarts
from unidist.launch.run import is_told


def test_each_restart_that_brings_the_training_further_comes_at_once() -> None:
    restarts = Restarts(3)
    assert [restarts.after(progress) for progress in (5, 10, 11)] == [Again(1, 0.0), Again(2, 0.0), Again(3, 0.0)]
    assert restarts.after(12) == GivenUp("no restart is left of 3", 3)


def test_fruitless_restarts_wait_longer_each_time_and_end() -> None:
    restarts = Restarts(100)
    assert restarts.after(5) == Again(1, 0.0)
    assert [restarts.after(5) for _ in range(FRUITLESS - 1)] == [Again(2, 1.0), Again(3, 2.0)]
    assert restarts.after(4) == GivenUp("3 restarts in a row brought the training no further", 0)


def test_progress_forgets_fruitless_restarts() -> None:
    restarts = Restarts(100)
    assert [restarts.after(progress).pause for progress in (5, 5, 5, 6, 6, 2)] == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]  # type: ignore[union-attr]
    given_up = restarts.after(6)
    assert isinstance(given_up, GivenUp)
    assert given_up.attempt == 3


def test_a_run_that_never_made_a_step_ends_with_its_first_error() -> None:
    restarts = Restarts(100)
    found = [restarts.after(0) for _ in range(FRUITLESS + 1)]
    assert found[-1] == GivenUp("3 restarts in a row brought the training no further", 0)


def test_where_no_restart_was_wanted_nothing_is_said_of_it() -> None:
    assert Restarts(0).after(7) == GivenUp("", 0)


def test_a_restart_that_is_left_after_fruitless_ones_says_that_none_is_left() -> None:
    restarts = Restarts(1)
    assert restarts.after(5) == Again(1, 0.0)
    assert restarts.after(5) == GivenUp("no restart is left of 1", 0)


def flight(*, seconds: dict[str, float], **fields: Any) -> Flight:
    """A record: its last phase began when those before it had ended."""
    known = dict.fromkeys(PHASES, 0.0) | seconds
    defaults: dict[str, Any] = {
        **{"rank": 0, "processes": 2, "pid": 1, "phase": "data", "phase_began": 0.0, "began": 0.0, "beat": 0.0},
        "first_step_began": None,
        **{"first_step_ended": None, "last_step_ended": None, "steps": 0, "resumed": 0, "kept": 0, "committed": None},
        **{"committed_at": None, "saves": False, "left": False, "timeout": None, "entries": ()},
    }
    return Flight(seconds=known, **(defaults | fields))


def test_steps_after_the_last_checkpoint_are_lost_where_the_attempt_failed() -> None:
    seconds = {"step": 20.0, "data": 3.0, "saving": 2.0}
    first = {"first_step_began": 106.0, "first_step_ended": 107.0}
    made = {0: flight(seconds=seconds, steps=10, kept=5, phase_began=130.0, beat=130.0, **first)}
    failed = spent(made, 100.0, 130.0, is_restart=False, has_failed=True)
    assert failed == Spent(all=30.0, starting=6.0, steps=10.0, lost=10.0, data=3.0, saving=2.0, count=5, stood=0)
    well = spent(made, 100.0, 130.0, is_restart=True, has_failed=False)
    assert well == Spent(all=30.0, steps=20.0, data=3.0, saving=2.0, restarting=7.0, count=10, stood=0)


def test_the_phase_under_way_counts_up_to_the_last_sign_of_life() -> None:
    of = {"steps": 2, "kept": 2, "first_step_ended": 1.0, "phase": "step", "phase_began": 4.0}
    stopped = {0: flight(seconds={"step": 2.0}, beat=9.0, **of)}
    assert spent(stopped, 0.0, 30.0, is_restart=False, has_failed=True).steps == 7.0
    runs = {0: flight(seconds={"step": 2.0}, beat=31.0, **of)}
    assert spent(runs, 0.0, 30.0, is_restart=False, has_failed=True).steps == 28.0


def test_a_restart_that_made_no_step_was_restarting_all_the_time() -> None:
    made = {0: flight(seconds={"starting": 4.0})}
    assert spent(made, 10.0, 16.0, is_restart=True, has_failed=True) == Spent(all=6.0, restarting=6.0)
    assert spent({}, 10.0, 16.0, is_restart=True, has_failed=True) == Spent(all=6.0, restarting=6.0)
    assert spent({}, 10.0, 16.0, is_restart=False, has_failed=True) == Spent(all=6.0)


def test_the_first_process_speaks_for_all() -> None:
    made = {
        rank: flight(rank=rank, seconds={"step": 1.0 + rank}, steps=1, kept=1, first_step_ended=1.0) for rank in (3, 2)
    }
    assert spent(made, 0.0, 5.0, is_restart=False, has_failed=False).steps == 3.0


def test_where_the_training_went_on_says_what_counted() -> None:
    """Not what a process noted that was killed: too little, or too much of one that was written in the background."""
    none, again = Spent(all=1.0), Spent(all=2.0, count=4, stood=18)
    for noted in (10, 13, 15):
        known = Spent(all=9.0, count=noted, stood=5)
        assert known + none + again == Spent(all=12.0, count=17, stood=5)
        assert none + known == Spent(all=10.0, count=noted, stood=5)
    assert known + Spent(count=20, stood=0) == Spent(all=9.0, count=15, stood=5)


def test_the_line() -> None:
    first = Spent(all=72.0, starting=12.0, steps=30.0, lost=2.5, data=1.0, saving=4.0, count=300)
    again = Spent(all=40.0, steps=20.0, restarting=6.25, count=200)
    assert str(first + again) == (
        "started in 12.0 s, then goodput 50%: 50.0 s of 100.0 s in 500 steps that count; 4.0 s saving, "
        "6.2 s restarting, "
        "1.0 s waiting for data, 2.5 s in steps that were lost"
    )
    assert str(Spent()).startswith("started in 0.0 s, then goodput 0%")
    short = Spent(all=55.2, starting=54.4, steps=0.7, count=16)
    assert str(short).startswith("started in 54.4 s, then goodput 87%: 0.7 s of 0.8 s in 16 steps"), "no failure"


def test_a_short_run_says_nothing_of_its_goodput() -> None:
    plain = Request(backend="torch", command=("-m", "this"))
    short = Spent(all=55.2, starting=54.4, steps=0.7, count=16)
    assert not is_told(short, plain)
    assert is_told(replace(short, all=61.0), plain)
    assert is_told(short, replace(plain, max_restarts=1))
    assert is_told(short, replace(plain, log_dir="logs"))
    assert not is_told(replace(short, all=61.0, count=0), replace(plain, log_dir="logs"))


@pytest.mark.parametrize("count", [FRUITLESS + 5])
def test_a_pause_has_a_bound(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidist.launch.restarts.FRUITLESS", count + 1)
    restarts = Restarts(1000)
    pauses = [found.pause for found in (restarts.after(1) for _ in range(count)) if isinstance(found, Again)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
