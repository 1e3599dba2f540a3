"""`unidist doctor --post-mortem`: what made-up records tell of a run that has ended."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unidist import cli
from unidist.flight.form import PHASES, WORD
from unidist.flight.reading import parse
from unidist.flight.recorder import Recorder

REDUCE = "all_reduce of float32 (2,) of ranks 0-2 for 'gradient'"


def save(folder: Path, rank: int, note: Callable[[Recorder], None], silent: float = 0.0, **fields: float) -> None:
    """A record whose last sign of life is 10 seconds after its last entry's begin, or earlier."""
    recorder = Recorder()
    note(recorder)
    data = bytearray(bytes(recorder))
    beat = parse(bytes(data)).entries[-1].begun + 10.0 - silent
    words: dict[str, float] = {"rank": rank, "processes": 3, "pid": 4711 + rank, "phase": PHASES.index("step")}
    words |= {"beat": beat, "phase_began": beat - 4.0, "steps": 21} | fields
    for name, value in words.items():
        struct.pack_into("<d" if name in ("beat", "phase_began") else "<Q", data, WORD[name] * 8, value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.flight").write_bytes(data)


def steps(recorder: Recorder, count: int, last: str = "") -> None:
    for _ in range(count):
        recorder.end(recorder.begin(recorder.kind(REDUCE)))
    if last:
        recorder.locate(recorder.begin(recorder.kind(last)), "train.py:30 in fit")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Of two attempts; in the last one rank 2 is late."""
    for rank in range(3):
        save(tmp_path / "attempt-2", rank, lambda recorder: steps(recorder, 1))
    for rank in (0, 1):
        save(tmp_path / "attempt-10", rank, lambda recorder: steps(recorder, 2, REDUCE))
    save(tmp_path / "attempt-10", 2, lambda recorder: steps(recorder, 2), silent=7.0, phase=PHASES.index("data"))
    own = f'File "{Path(cli.__file__).parent}/flight/recorder.py", line 1 in _live'
    (tmp_path / "attempt-10" / "rank-2.stacks").write_text(
        f'Thread 0x1 (most recent call first):\n  {own}\n\nThread 0x2 (most recent call first):\n  File "reader.py", '
        "line 91 in load\n"
    )
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["doctor", "--post-mortem", *arguments]) == 0
    return capsys.readouterr().out


def test_the_last_attempt_is_told_with_who_was_late(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, str(logs)).rstrip().splitlines() == [
        "attempt 10: records of ranks 0-2",
        "",
        "rank   pid  phase    for  steps  silent for  last collective",
        f"   0  4711  step   4.0 s     21       0.0 s  {REDUCE}: waits for 10.0 s",
        f"   1  4712  step   4.0 s     21       0.0 s  {REDUCE}: waits for 10.0 s",
        f"   2  4713  data   4.0 s     21       7.0 s  {REDUCE}: ended 3.0 s before",
        "",
        f"ranks 0, 1 waited 10.0 s in {REDUCE}, the 3rd, at train.py:30 in fit",
        "rank 2 had not come to it: it was in 'data' for 4.0 s, then gave no sign of life for 7.0 s, had come to 2 of "
        f"them, and last to {REDUCE}: ended 3.0 s before",
        "",
        "stacks of rank 2",
        "  Thread 0x2 (most recent call first):",
        '    File "reader.py", line 91 in load',
    ]


def test_an_earlier_attempt_is_told_where_it_is_named(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, str(logs / "attempt-2"))
    assert text.startswith("attempt 2: records of ranks 0-2\n")
    assert text.rstrip().endswith("no process waited for others")


def test_the_same_as_json(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, str(logs), "--json"))
    assert (found["attempt"], found["without_record"], found["damaged"]) == (10, [], [])
    awaited = found["awaited"]
    assert (awaited["what"], awaited["count"], awaited["waiting"], awaited["late"]) == (REDUCE, 3, [0, 1], [2])
    assert awaited["seconds"] == pytest.approx(10.0, abs=0.5)
    last: Any = found["processes"][2]
    assert (last["rank"], last["phase"], last["steps"], last["last"]["state"]) == (2, "data", 21, "ended")
    assert last["stacks"] == ["Thread 0x2 (most recent call first):", '  File "reader.py", line 91 in load']
    assert found["processes"][0]["last"]["state"] == "waits"


def test_what_is_missing_or_damaged_is_told(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "attempt-10" / "rank-1.flight").write_bytes(b"cut")
    (logs / "attempt-10" / "rank-2.flight").unlink()
    lines = told(capsys, str(logs)).splitlines()
    assert lines[1] == "ranks 1, 2: no record: not come so far as to join, or on another node"
    assert "rank-1.flight is no record of a process of unidist (3 bytes" in lines[2]
    assert [line for line in lines if "had not come" in line] == [
        "rank 1 had not come to it: it has no record",
        "rank 2 had not come to it: it has no record",
    ]


def test_ranks_that_wait_elsewhere_have_not_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    barrier = "barrier of ranks 0-2"
    for rank in (0, 1):
        save(tmp_path, rank, lambda recorder: steps(recorder, 0, REDUCE))
    save(tmp_path, 2, lambda recorder: steps(recorder, 0, barrier))
    text = told(capsys, str(tmp_path))
    assert text.startswith("records of ranks 0-2\n")
    assert "rank 2 had not come to it: it was in 'step' for 4.0 s, none of them is among its last, and last to " in text
    assert f"{barrier}: waits for 10.0 s" in text
    # Who has come, and gone on, is not late.
    save(tmp_path, 2, lambda recorder: steps(recorder, 1))
    assert "all others of it had come" in told(capsys, str(tmp_path))


@pytest.mark.parametrize("damaged", [False, True])
def test_where_there_is_nothing_to_read(damaged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if damaged:
        (tmp_path / "rank-0.flight").write_bytes(b"")
    assert cli.main(["doctor", "--post-mortem", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert ("is no record of a process" if damaged else "there is no record (*.flight)") in said.err
