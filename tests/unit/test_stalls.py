"""Who holds up the others, found from made-up records: the judgement alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.flights import flight
from unidist.flight.reading import Entry, Flight
from unidist.launch import stalls

NOW, TIMEOUT = 1000.0, 10.0
REDUCE = "all_reduce of float32 (2,) of ranks 0-3 for 'gradient'"
PAIR = "all_gather of float32 (2,) of ranks 2, 3"


def waits(since: float, what: str = REDUCE, **more: Any) -> Entry:
    return Entry(1, what, more.pop("site", ""), NOW - since, None, **{"count": 2, **more})


def failed(since: float, until: float, what: str = REDUCE, number: int = 1) -> Entry:
    return Entry(number, what, "", NOW - since, NOW - until, failed=True, count=2)


def done() -> Entry:
    return Entry(1, REDUCE, "", NOW - 20, NOW - 19, count=1)


def find(*entries: Entry | None, **more: Any) -> str | None:
    """Of ranks that have these last entries."""
    flights = {rank: flight(rank, entries=(one,) if one else (), beat=NOW) for rank, one in enumerate(entries)}
    left = {rank: NOW - seconds for rank, seconds in more.pop("left", {}).items()}
    found = stalls.find(flights | more.pop("flights", {}), range(len(entries)), TIMEOUT, NOW, left)
    return None if found is None else str(found)


def test_the_one_that_does_not_wait_holds_up_those_that_do() -> None:
    text = f"rank 2 did not come to {REDUCE}, for which ranks 0, 1, 3 waited 11 s at train.py:3 in fit"
    first = waits(11, site="train.py:3 in fit")
    assert find(first, waits(10.5), done(), waits(10.2)) == text
    assert find(waits(11), None, None, waits(1)) == (
        f"ranks 1, 2 did not come to {REDUCE}, for which ranks 0, 3 waited 11 s"
    )


def test_nobody_stalls_before_the_timeout() -> None:
    assert find(waits(9), done(), done(), done()) is None
    assert find(waits(9.95), done(), done(), done()) is not None
    assert find(done(), done(), done(), done()) is None


def test_where_all_wait_nobody_is_named() -> None:
    """They have a quarrel of their own, and end it by themselves."""
    assert find(waits(20), waits(20), waits(20), waits(20, "barrier of ranks 0-3")) is None


def test_what_is_under_way_is_not_waited_in() -> None:
    under_way = Entry(1, REDUCE, "", NOW - 20, None, is_waited_in=False)
    assert find(under_way, under_way, done(), done()) is None
    named = find(waits(11, count=2), waits(11, count=2), under_way, waits(11, count=2))
    assert named is not None
    assert named.startswith("rank 2 did not come")


def test_one_that_has_come_and_gone_on_is_not_late() -> None:
    """As the root of a broadcast, which waits for nobody."""
    assert find(waits(11, count=3), waits(11, count=3), replace(done(), count=3), waits(11, count=3)) is None
    assert find(waits(11, count=3), waits(11, count=3), replace(done(), count=2), waits(11, count=3)) is not None


def test_one_that_reads_a_value_waits_for_its_last_step() -> None:
    steps = [
        Entry(k, "train step of processes 0, 1", "", NOW - 20 + k, None, count=k, is_waited_in=False) for k in (1, 2)
    ]
    reads = replace(waits(11, "reading a value", site="train.py:30 in fit"), number=3)
    reading = flight(0, entries=(*steps, reads), beat=NOW)
    behind = flight(1, entries=(replace(steps[0], ended=NOW - 19),), beat=NOW)
    text = "did not come to train step of processes 0, 1, for which rank 0 waited 11 s at train.py:30 in fit"
    assert str(stalls.find({0: reading, 1: behind}, range(2), TIMEOUT, NOW)) == f"rank 1 {text}"
    # Where no step is known.
    assert find(reads, None) == "rank 1 holds up rank 0, which waited 11 s in reading a value at train.py:30 in fit"


def test_one_that_has_waited_in_vain_is_believed() -> None:
    """It has raised by now, and its end may take a while."""
    assert find(failed(12, 1), waits(3), done(), waits(4)) == (
        f"rank 2 did not come to {REDUCE}, for which ranks 0, 1, 3 waited 11 s"
    )
    # An error that came at once is no wait.
    assert find(failed(12, 11.9), waits(3), done(), waits(4)) is None


def test_only_members_are_late() -> None:
    """Ranks 2 and 3 wait for each other alone; 0 and 1 do something else."""
    assert find(done(), done(), waits(11, PAIR), waits(11, PAIR)) is None
    assert (
        find(done(), done(), waits(11, PAIR), done()) == f"rank 3 did not come to {PAIR}, for which rank 2 waited 11 s"
    )
    # Where a text does not tell of members, all of this node may be meant.
    assert find(done(), waits(11, "the meeting of all processes")) == (
        "rank 0 holds up rank 1, which waited 11 s in the meeting of all processes"
    )


def test_a_process_without_a_record_has_not_come() -> None:
    flights = {0: flight(0, entries=(waits(11, "the meeting of all processes"),), beat=NOW)}
    found = stalls.find(flights, range(2), TIMEOUT, NOW)
    assert found is not None
    assert found.ranks == (1,)


def test_one_that_has_ended_well_is_not_waited_for_until_the_timeout() -> None:
    text = f"rank 1 did not come to {REDUCE}, for which rank 0 waits"
    assert find(waits(4), done(), waits(4), waits(4), left={1: 4}) == text
    assert find(waits(2), done(), waits(2), waits(2), left={1: 4}) is None
    assert find(waits(4), done(), waits(4), waits(4), left={1: 2}) is None
    # It has done its part, or has none.
    assert find(waits(4), waits(5), waits(4), waits(4), left={1: 4}) is None
    assert find(done(), done(), waits(4, PAIR), waits(4, PAIR), left={1: 4}) is None


@pytest.mark.parametrize("phase", ["joining", "program"])
def test_one_that_has_ended_before_it_joined_is_missed_by_those_that_join(phase: str) -> None:
    meets = flight(0, phase=phase, beat=NOW, entries=(waits(4, "the meeting of all processes"),))
    found = stalls.find({0: meets}, (0, 1), TIMEOUT, NOW, {1: NOW - 5})
    expected = "rank 1 did not come to the meeting of all processes, for which rank 0 waits"
    # A process that is no member of a job computes alone, for as long as it likes.
    assert (None if found is None else str(found)) == (expected if phase == "joining" else None)


def test_a_processs_own_timeout_counts() -> None:
    patient = {0: flight(0, entries=(waits(11),), beat=NOW, timeout=60.0)}
    assert find(None, done(), flights=patient) is None
    hasty = {0: flight(0, entries=(waits(3),), beat=NOW, timeout=2.0)}
    assert find(None, done(), flights=hasty) is not None


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    # One that begins may wait for a disk.
    waiting = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def is_silent(flights: dict[int, Flight]) -> bool:
    found = stalls.find(flights, (0, 1), TIMEOUT, NOW)
    assert found is not None
    return found.is_silent


def test_a_process_that_is_silent_is_named_with_its_state(child: subprocess.Popen[bytes]) -> None:
    silent = {1: flight(1, beat=NOW - 11, pid=child.pid)}
    assert find(waits(11), None, flights=silent) == (
        "rank 1 gave no sign of life for 11 s: it runs, and none of its threads does"
    )
    assert is_silent(silent)
    child.send_signal(19)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not is_silent(silent)
    stopped = "rank 1 gave no sign of life for 11 s: it is stopped (SIGSTOP)"
    assert find(waits(11), None, flights=silent) == stopped
    late = {1: flight(1, beat=NOW, pid=child.pid)}
    assert find(waits(11), None, flights=late) == (
        f"rank 1 did not come to {REDUCE}, for which rank 0 waited 11 s; rank 1 is stopped (SIGSTOP)"
    )
    # Another that is silent waits for it.
    assert find(None, None, flights=silent | {0: flight(0, beat=NOW - 11, pid=os.getpid())}) == stopped


def test_one_that_has_ended_is_neither_silent_nor_late(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = {1: flight(1, beat=NOW - 11, pid=child.pid)}
    assert find(waits(11), None, flights=ended) is None
    # It has left its world.
    assert find(waits(11), None, flights={1: replace(ended[1], pid=0)}) is None


def test_threads_of_the_package_are_left_out_of_stacks() -> None:
    package, python = stalls._PACKAGE, stalls._PYTHON
    text = (
        f'Thread 0x01 (most recent call first):\n  File "{package}/flight/recorder.py", line 1 in _live\n'
        f'  File "{python}/threading.py", line 2 in run\n\n'
        f'Thread 0x02 (most recent call first):\n  File "{python}/queue.py", line 3 in get\n'
        f'  File "{python}/site-packages/user/pool.py", line 4 in work\n\n'
        f'Current thread 0x03 (most recent call first):\n  File "{package}/keras/fit_observer.py", line 5 in fit\n'
        '  File "/home/train.py", line 6 in <module>\n'
    )
    lines = stalls.threads_of(text)
    assert [line.split(" in ")[-1] for line in lines if "File" in line] == ["fit", "<module>", "get", "work"]
