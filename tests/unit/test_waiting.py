"""Files of tests that mostly wait have a worker of their own (ci/waiting.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ci.waiting import WaitingApart

TESTS = [f"{file}::test_{k}" for file in ("a", "waits", "b", "waits too", "c") for k in range(4)]


class Worker:
    """A worker of pytest-xdist as its scheduler sees it."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def scheduled() -> tuple[WaitingApart, list[Worker]]:
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False), getvalue=lambda name: ["popen"] * 3 if name == "tx" else []
    )
    log = SimpleNamespace(loadscopesched=print, loadfilesched=print)
    scheduler = WaitingApart(config, log, frozenset({"waits", "waits too"}))
    workers = [Worker(k) for k in range(3)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, TESTS)
    scheduler.schedule()
    return scheduler, workers


def files(worker: Worker) -> list[str]:
    return list(dict.fromkeys(TESTS[number].partition("::")[0] for number in worker.given))


def run(scheduler: WaitingApart, worker: Worker) -> None:
    """All tests that a worker has been given, and what it is given meanwhile."""
    done = 0
    while done < len(worker.given):
        scheduler.mark_test_complete(worker, worker.given[done])
        done += 1


def test_the_last_worker_runs_the_files_that_wait_and_no_others(
    scheduled: tuple[WaitingApart, list[Worker]],
) -> None:
    scheduler, (first, second, last) = scheduled
    assert [files(worker) for worker in (first, second, last)] == [["a"], ["b"], ["waits"]]
    run(scheduler, last)
    assert files(last) == ["waits", "waits too"]
    assert last.shutting_down
    assert not first.shutting_down
    run(scheduler, first)
    run(scheduler, second)
    assert files(first) + files(second) == ["a", "c", "b"]
    assert scheduler.tests_finished


def test_the_others_take_them_when_nothing_else_is_left(scheduled: tuple[WaitingApart, list[Worker]]) -> None:
    scheduler, (first, second, last) = scheduled
    run(scheduler, first)
    assert files(first) == ["a", "c", "waits too"]
    run(scheduler, second)
    run(scheduler, last)
    assert sorted(number for worker in (first, second, last) for number in worker.given) == list(range(len(TESTS)))
    assert scheduler.tests_finished
