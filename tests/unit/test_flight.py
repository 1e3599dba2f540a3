"""The record of what a process is at: written, read while it is written, damaged, cut, full, and from two threads."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import flights
from unidist.backends.desync import line_of
from unidist.flight.form import ENTRIES, HEADER, PHASES, SIZE, TEXTS, WORD
from unidist.flight.reading import FlightError, order, parse, read, read_all
from unidist.flight.recorder import LASTS, Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


def test_what_is_noted_is_read(recorder: Recorder, tmp_path: Path) -> None:
    """The same in memory, in a file, and in memory again."""
    reduce, gather = recorder.kind("all_reduce"), recorder.kind("all_gather")
    recorder.end(recorder.begin(reduce))
    recorder.end(recorder.begin(gather), failed=True)
    recorder.locate(recorder.begin(reduce), "train.py:3 in fit")
    recorder.open(tmp_path, 1, 2)
    recorder.start(gather)
    path = tmp_path / "rank-1.flight"
    found = read(path)
    assert (found.rank, found.processes, found.pid) == (1, 2, os.getpid())
    wanted = [("all_reduce", 1, "ended"), ("all_gather", 1, "failed"), ("all_reduce", 2, "waits")]
    wanted.append(("all_gather", 2, "under way"))
    assert flights.said(list(found.entries)) == wanted
    assert [entry.site for entry in found.entries] == ["", "", "train.py:3 in fit", ""]
    assert [entry.number for entry in found.entries] == [1, 2, 3, 4]
    recorder.close()
    assert (read(path).pid, parse(bytes(recorder)).pid) == (0, os.getpid())
    recorder.end(3)
    assert flights.how(parse(bytes(recorder)).entries[2]) == "ended"
    assert flights.how(read(path).entries[2]) == "waits"


def test_a_wait_is_counted_from_its_begin(recorder: Recorder) -> None:
    number = recorder.start(recorder.kind("a step"))
    started = parse(bytes(recorder))
    assert (started.wait, len(started.open)) == (None, 1)
    time.sleep(0.01)
    recorder.wait(number)
    waiting = parse(bytes(recorder)).wait
    assert waiting is not None
    assert waiting.begun >= started.entries[0].begun + 0.01
    recorder.go_on(number)
    assert parse(bytes(recorder)).wait is None
    recorder.end(number)
    assert parse(bytes(recorder)).open == ()


def test_what_was_waited_in_in_vain_is_known_behind_what_failed_after_it(recorder: Recorder) -> None:
    step, read_one = recorder.kind("a step"), recorder.kind("a read")
    recorder.end(recorder.begin(step))
    under_way, long = recorder.start(step), recorder.begin(read_one)
    time.sleep(0.01)
    recorder.end(long, failed=True)
    recorder.wait(under_way)
    recorder.end(under_way, failed=True)
    recorder.end(recorder.begin(read_one), failed=True)
    recorder.start(step)
    found = parse(bytes(recorder)).wait
    assert found is not None
    assert found.number == long
    recorder.end(recorder.begin(step))
    assert parse(bytes(recorder)).wait is None


def test_the_ring_keeps_the_last_ones(recorder: Recorder) -> None:
    kind = recorder.kind("a step")
    first = recorder.begin(kind)
    for _ in range(2 * ENTRIES):
        recorder.end(recorder.begin(kind))
    # Its place is another's by now.
    recorder.end(first, failed=True)
    recorder.wait(first)
    recorder.go_on(first)
    recorder.locate(first, "nowhere")
    found = parse(bytes(recorder)).entries
    assert [entry.number for entry in found] == list(range(ENTRIES + 2, 2 * ENTRIES + 2))
    assert [entry.count for entry in found] == [entry.number for entry in found]
    assert {flights.how(entry) for entry in found} == {"ended"}
    assert {entry.site for entry in found} == {""}


def test_texts_beyond_the_room_are_one(recorder: Recorder) -> None:
    long = "x" * 1000
    kinds = [recorder.kind(f"{number} {long}") for number in range(2 * TEXTS // 1000)]
    assert len(set(kinds)) < len(kinds)
    assert kinds[-1] == kinds[-2]
    for kind in (kinds[0], kinds[-1]):
        recorder.end(recorder.begin(kind))
    assert [entry.what for entry in parse(bytes(recorder)).entries] == [f"0 {long}", "(one of too many kinds)"]
    # Ring and header are untouched.
    assert parse(bytes(recorder)).phase == "starting"


def test_two_threads_note_at_once(recorder: Recorder) -> None:
    each = 2000

    def note(name: str) -> None:
        for k in range(each):
            recorder.end(recorder.begin(recorder.kind(f"{name} {k % 7}")))

    threads = [threading.Thread(target=note, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = parse(bytes(recorder)).entries
    assert [entry.number for entry in found] == list(range(2 * each - ENTRIES + 1, 2 * each + 1))
    for what in {entry.what for entry in found}:
        counts = [entry.count for entry in found if entry.what == what]
        assert counts == list(range(counts[0], counts[0] + len(counts)))
        assert counts[-1] <= each // 7 + 1
    assert {flights.how(entry) for entry in found} == {"ended"}


def test_a_forked_child_keeps_a_record_of_its_own(recorder: Recorder, tmp_path: Path) -> None:
    recorder.open(tmp_path, 0, 1)
    recorder.forked()
    recorder.end(recorder.begin(recorder.kind("of the child")))
    assert read(tmp_path / "rank-0.flight").entries == ()
    assert len(parse(bytes(recorder)).entries) == 1


def test_damaged_and_cut_files_are_none(recorder: Recorder, tmp_path: Path) -> None:
    recorder.end(recorder.begin(recorder.kind("a step")))
    whole = bytes(recorder)
    path = tmp_path / "rank-0.flight"
    for data in (b"", whole[:100], whole[:-1], whole + b"\0", b"x" * SIZE):
        path.write_bytes(data)
        with pytest.raises(FlightError, match=r"rank-0\.flight is no record"):
            read(path)
    for field, value, text in (("phase", len(PHASES), "no phase 8"), ("phase", 2**63, "no phase")):
        at = WORD[field] * 8
        path.write_bytes(whole[:at] + value.to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(FlightError, match=text):
            read(path)
    assert read_all(tmp_path) == {}


@pytest.mark.parametrize("kept", [0, HEADER, HEADER + 4, HEADER + TEXTS])
def test_what_is_not_written_yet_is_read_as_far_as_it_is(recorder: Recorder, kept: int, tmp_path: Path) -> None:
    """Whatever is lost or garbled behind the header is no error: it was read while it was written."""
    recorder.end(recorder.begin(recorder.kind("a step")))
    header = bytes(recorder)[: max(kept, 8 * len(WORD))]
    for filling in (b"\0", b"\xff"):
        (tmp_path / "rank-0.flight").write_bytes(header + filling * (SIZE - len(header)))
        found = read_all(tmp_path)[0]
        assert found.pid == os.getpid()
        assert all(entry.what in ("a step", "?", "") for entry in found.entries)


def test_the_line_of_a_long_wait_is_found(recorder: Recorder, tmp_path: Path) -> None:
    """Of the thread that waits, and of none that was only started, or is over."""
    asked = []

    def line_of(thread: int) -> str:
        asked.append(thread)
        return "train.py:7 in fit"

    over = recorder.begin(recorder.kind("over"))
    recorder.begin(recorder.kind("waits"))
    recorder.start(recorder.kind("under way"))
    recorder.open(tmp_path, 0, 1, line_of)
    time.sleep(LASTS / 2)
    recorder.end(over)
    assert asked == []
    limit = time.monotonic() + 20
    while not (found := read(tmp_path / "rank-0.flight").entries)[1].site and time.monotonic() < limit:
        time.sleep(0.02)
    assert [entry.site for entry in found] == ["", "train.py:7 in fit", ""]
    assert asked == [threading.get_ident()]


def test_the_line_is_that_of_the_program_and_not_one_of_pythons_own() -> None:
    ready: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=lambda: waits_for(ready), daemon=True)
    thread.start()
    limit = time.monotonic() + 20
    while not (found := re.fullmatch(r"test_flight\.py:\d+ in waits_for", line_of(thread.ident))):
        assert time.monotonic() < limit, line_of(thread.ident)
        time.sleep(0.01)
    ready.put(1)
    assert found


def waits_for(ready: queue.Queue[int]) -> int:
    return ready.get()


STACKS = """
import sys, time
from pathlib import Path
from unidist.flight.recorder import recorder
recorder.open(Path(sys.argv[1]), 3, 4)
def stand_here():
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
stand_here()
"""


def test_a_signal_writes_the_stacks_and_an_order_ends_the_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STACKS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR2)
        stacks, limit = tmp_path / "rank-3.stacks", time.monotonic() + 20
        while "in <module>" not in (text := stacks.read_text()) and time.monotonic() < limit:
            time.sleep(0.02)
        assert "in stand_here" in text
        assert "in _live" in text  # of the thread that gives signs of life
        assert process.poll() is None
        first = read(tmp_path / "rank-3.flight")
        time.sleep(0.5)
        assert 0.2 < read(tmp_path / "rank-3.flight").beat - first.beat < 5
        order(tmp_path / "rank-3.flight", 1)
        assert process.wait(20) == 128 + signal.SIGTERM
