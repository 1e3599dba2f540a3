"""When processes look whether one of them was asked to end, and what becomes of the signals that ask."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from unidist.flight.form import WORD
from unidist.flight.recorder import recorder
from unidist.keras.checkpoint import leaving
from unidist.keras.checkpoint.leaving import Leaving, Requests
from unidist.keras.consistency import stopping as its_looks
from unidist.keras.consistency.processes import Processes, taking_part


class Clock:
    """A clock that the test moves, and what two processes send to each other; the other one is `other`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks: list[float] = []
        self.cost = 0.0
        self.other = 0

    def of_all(self, number: int, purpose: str) -> tuple[int, ...]:
        self.now += self.cost
        self.looks.append(self.now)
        return (number, self.other)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(its_looks, "_now", lambda: found.now)
    token = taking_part.set(Processes(0, ((0,), (1,)), lambda array, purpose: array, found.of_all))
    yield found
    taking_part.reset(token)


def steps(clock: Clock, training: Leaving, seconds: float, count: int) -> list[bool]:
    found = []
    for _ in range(count):
        clock.now += seconds
        found.append(training.after_step())
    return found


def test_a_look_comes_about_once_a_second(clock: Clock) -> None:
    training = Leaving()
    assert not any(steps(clock, training, 1 / 8, 68))
    apart = [after - before for before, after in itertools.pairwise(clock.looks)]
    assert apart == [1 / 4, 1 / 2, *[1.0] * 7]


def test_of_steps_longer_than_a_second_each_looks(clock: Clock) -> None:
    steps(clock, Leaving(), 1.5, 10)
    assert len(clock.looks) == 10


def test_what_looks_cost(clock: Clock) -> None:
    """Where one takes 5 ms, two seconds are between; where it takes long, five."""
    for cost, between in ((0.005, 2.0), (0.1, 5.0)):
        clock.cost, clock.looks = cost, []
        steps(clock, Leaving(), 0.01, 10000)
        assert clock.looks[-1] - clock.looks[-2] == pytest.approx(between, rel=0.06)


def test_an_epochs_end_is_looked_at_where_epochs_are_long(clock: Clock) -> None:
    training = Leaving()
    assert steps(clock, training, 0.01, 1) == [False]
    # A step's look is about the epoch before.
    for seconds, looks in ((0.5, 1), (0.5, 0), (30.0, 0), (30.0, 1), (0.5, 1), (0.5, 0)):
        clock.looks = []
        clock.now += seconds
        training.after_epoch()
        assert len(clock.looks) == looks
        steps(clock, training, 0.01, 2)
    assert training.now() is False


def test_another_process_was_asked(clock: Clock) -> None:
    training = Leaving()
    steps(clock, training, 2.0, 1)
    clock.other = 1
    assert steps(clock, training, 2.0, 1) == [True]
    assert training.after_epoch() is training.now() is True


def handler_of(number: int) -> int:
    return leaving._handler_of(leaving._action(number))


def test_what_was_there_before_is_there_again() -> None:
    """Handlers of Python's and of C's. SIGUSR1 stays what somebody has made it."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    faulthandler.register(signal.SIGUSR1)
    own = handler_of(signal.SIGUSR1)
    try:
        requests = Requests()
        requests.listen()
        assert (recorder._whole[WORD["saves"]], handler_of(signal.SIGUSR1)) == (1, own)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (requests.number, came) == (signal.SIGTERM, [])
        # What has come too late for the training.
        requests.stop(deliver=True)
        assert (came, recorder._whole[WORD["saves"]]) == ([signal.SIGTERM], 0)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGTERM)
        own = handler_of(signal.SIGTERM)
        requests = Requests()
        requests.listen()
        assert handler_of(signal.SIGTERM) != own
        assert handler_of(signal.SIGUSR1) != 0
        requests.stop()
        assert (handler_of(signal.SIGTERM), handler_of(signal.SIGUSR1)) == (own, 0)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_does_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    now = [0.0]
    monkeypatch.setattr(leaving, "_now", lambda: now[0])
    requests = Requests()
    try:
        requests.listen()
        for seconds in (0.0, 0.1, 10.0):
            now[0] += seconds
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        requests.stop()
        signal.signal(signal.SIGTERM, before)


def test_a_fork_ends_as_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker that reads data: what it inherits of the record is its parent's."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    requests = Requests()
    try:
        requests.listen()
        monkeypatch.setattr(os, "getpid", lambda: 1)
        signal.raise_signal(signal.SIGTERM)
        assert (came, requests.number, recorder._whole[WORD["saves"]]) == ([signal.SIGTERM], None, 1)
    finally:
        monkeypatch.undo()
        recorder.set("saves", 0)
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = handler_of(signal.SIGTERM)
    monkeypatch.setattr(threading, "current_thread", lambda: None)
    requests = Requests()
    requests.listen()
    assert handler_of(signal.SIGTERM) == before
    requests.stop()
