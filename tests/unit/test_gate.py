"""The gate before collectives of Keras on TensorFlow: who has come, who has come to something else, who is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import flights
from unidist import DesyncError, ProcessLostError
from unidist.backends.lines import Line
from unidist.backends.tensorflow.gate import Gate

COUNT = 3
ALL = tuple(range(COUNT))


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    """One of each of three processes, in threads of one."""
    near, far = {}, {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for k in ALL[1:]:
            far[k] = Line(socket.create_connection(server.getsockname()))
            near[k] = Line(server.accept()[0])
    found = [Gate(0, COUNT, near, 20.0), *(Gate(k, COUNT, {0: line}, 20.0) for k, line in far.items())]
    yield found
    for gate in found:
        gate.close()


def at_once(*actions: Callable[[], Any]) -> list[Exception | None]:
    """What each of them raised."""
    found: list[Exception | None] = [None] * len(actions)

    def run(k: int) -> None:
        try:
            actions[k]()
        except (DesyncError, ProcessLostError) as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return found


def come(gate: Gate, what: str = "a step", members: tuple[int, ...] = ALL) -> Callable[[], None]:
    return lambda: gate.come(what, members, members)


def test_all_go_on_when_all_have_come(gates: list[Gate]) -> None:
    for _ in range(50):
        assert at_once(*(come(gate) for gate in gates)) == [None] * COUNT


def test_coming_is_in_the_record_until_all_go_on(gates: list[Gate]) -> None:
    found = flights.since(lambda: at_once(*(come(gate, "a noted step") for gate in gates)))
    name = "a noted step of processes 0-2"
    assert sorted(flights.said(found)) == [(name, k, "ended") for k in (1, 2, 3)]
    # As an adapter says it.
    noted = "all_reduce of float32 (16,)"
    calls = [lambda gate=gate: gate.come("a reduce", ALL, ALL, noted, ("x",)) for gate in gates]
    found = flights.since(lambda: at_once(*calls))
    assert {entry.what for entry in found} == {f"{noted} over ('x',) of processes 0-2"}


def test_some_go_on_without_the_others(gates: list[Gate]) -> None:
    assert at_once(come(gates[1], "a", (1, 2)), come(gates[2], "a", (1, 2))) == [None, None]
    assert at_once(come(gates[1], "alone", (1,))) == [None]
    # Two groups at a time, and one that process 0 is in.
    assert at_once(come(gates[0], "b", (0, 2)), come(gates[2], "b", (0, 2))) == [None, None]


def test_those_that_have_come_to_different_things_are_told_and_may_go_on(gates: list[Gate]) -> None:
    errors: list[Exception | None] = []
    noted = flights.since(lambda: errors.extend(at_once(come(gates[0]), come(gates[1], "a call"), come(gates[2]))))
    assert [flights.how(entry) for entry in noted] == ["failed"] * COUNT
    for error in errors:
        assert isinstance(error, DesyncError)
        assert (error.ranks, error.collective in ("a step", "a call")) == (ALL, True)
        assert "process 0 to a step; process 1 to a call; process 2 to a step" in str(error)
    assert at_once(*(come(gate) for gate in gates)) == [None] * COUNT


@pytest.mark.parametrize("missing", ALL)
def test_one_that_does_not_come_is_told_when_it_comes(gates: list[Gate], missing: int) -> None:
    there = [gate for k, gate in enumerate(gates) if k != missing]
    for gate in there:
        gate.timeout = 0.3
    errors: list[Exception | None] = []
    noted = flights.since(lambda: errors.extend(at_once(*(come(gate) for gate in there))))
    assert [flights.how(entry) for entry in noted] == ["failed"] * 2
    first, second = errors
    assert all(isinstance(error, ProcessLostError) for error in (first, second))
    assert f"processes [{missing}] were not there after 0.3 s" in str(first) + str(second)
    (late,) = at_once(come(gates[missing]))
    assert isinstance(late, ProcessLostError)
    assert "waited for the others in vain" in str(late)


@pytest.mark.parametrize("ended", ALL)
def test_one_that_has_ended_is_told_at_once(gates: list[Gate], ended: int) -> None:
    there = [gate for k, gate in enumerate(gates) if k != ended]
    errors = at_once(*(come(gate) for gate in there), gates[ended].close)
    for error in errors[:-1]:
        assert isinstance(error, ProcessLostError)
        assert f"process {ended} has ended" in str(error)
