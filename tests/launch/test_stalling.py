"""A process that does not go on is found and named by `unidist run`. The programs keep records as adapters do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.runs import Done, run
from unidist import cli

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys, time
from unidist.backends import environment
from unidist.backends.desync import line_of
from unidist.flight.recorder import open_in_environment, recorder

rank = environment.detect().process_index
open_in_environment(rank, 2, line_of)
recorder.set_timeout(2.0)
kind = recorder.kind("barrier of processes 0, 1")
recorder.end(recorder.begin(kind))

def stand_here():
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        recorder.begin(kind)
    while True:
        time.sleep(0.01)

if rank == 0:
    recorder.begin(kind)
stand_here() if rank else time.sleep(60)
"""


def stalled(how: str, folder: Path) -> Done:
    (folder / "program.py").write_text(PROGRAM)
    return run(["-n", "2", "--backend", "jax", "--log-dir", "logs", "program.py", how], folder)


@pytest.mark.parametrize("how", ["stop", "loop"])
def test_who_does_not_go_on_is_named_and_where(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = stalled(how, tmp_path)
    assert done.code == 124
    said = [line for line in done.err.splitlines() if line.startswith("unidist: ")][-1]
    if how == "stop":
        # By its silence, or by the wait of rank 0, whichever began first.
        assert said.startswith(("unidist: rank 1 gave no sign of life for 2 s", "unidist: rank 1 did not come to "))
        assert said.endswith(" is stopped (SIGSTOP); the others were ended; where rank 1 stood:")
    else:
        assert said.startswith("unidist: rank 1 did not come to barrier of processes 0, 1, for which rank 0 waited 2 s")
        assert said.endswith("at program.py:22 in <module>; the others were ended; where rank 1 stood:")
    assert any(line.startswith("[1] ") and line.endswith(" in stand_here") for line in done.err.splitlines())
    # What it did after it was woken is not in its record.
    assert cli.main(["doctor", "--post-mortem", str(tmp_path / "logs"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["awaited"]["waiting"], found["awaited"]["late"]) == ([0], [1])
    assert (found["processes"][1]["silent_seconds"] > 0.5) == (how == "stop")
    assert found["processes"][1]["stacks"][0].endswith("(most recent call first):")


DEAF = (
    PROGRAM.partition("def stand_here")[0]
    + """
if rank == 0:
    import ctypes

    # As TensorFlow: Python's lock is held in C, and no handler runs.
    signal.signal(signal.SIGTERM, lambda *_: None)
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)
time.sleep(1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_who_waits_in_c_for_a_lost_one_does_not_use_up_the_grace(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(DEAF)
    done = run(["-n", "2", "--backend", "jax", "--grace", "60", "--timeout", "60", "program.py"], tmp_path)
    assert "unidist: rank 1 of 2 failed first, with signal SIGKILL; the others were ended" in done.err
    assert done.seconds < 30
