"""Threads that carry messages interrupt no other (unidist/backends/turns.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unidist.backends.turns import interrupting_nobody

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the policy")


@pytest.fixture
def ends() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def started(ends: threading.Event, name: str) -> int:
    """The system's number of a thread that waits, under the name that the system has for it."""
    ready = threading.Event()

    def wait() -> None:
        Path("/proc/thread-self/comm").write_text(name)
        ready.set()
        ends.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    assert ready.wait(60)
    assert thread.native_id is not None
    return thread.native_id


def test_only_what_starts_inside_by_its_name(monkeypatch: pytest.MonkeyPatch, ends: threading.Event) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = started(ends, "loop")
    with interrupting_nobody("loop"):
        inside, other = started(ends, "loop"), started(ends, "other")
    after = started(ends, "loop")
    policies = [os.sched_getscheduler(thread) for thread in (before, inside, other, after, 0)]
    assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_OTHER]


def test_all_that_start_inside_where_no_name_is_given(monkeypatch: pytest.MonkeyPatch, ends: threading.Event) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with interrupting_nobody():
        inside = started(ends, "any")
    assert os.sched_getscheduler(inside) == os.SCHED_BATCH


@pytest.mark.parametrize("threads", ["2", None])
def test_nothing_changes_where_a_process_computes_in_several_threads(
    monkeypatch: pytest.MonkeyPatch, ends: threading.Event, threads: str | None
) -> None:
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with interrupting_nobody():
        inside = started(ends, "any")
    assert os.sched_getscheduler(inside) == os.SCHED_OTHER
