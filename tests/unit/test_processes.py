"""ProcessWorld: results come back, failures come back, and no process stays."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.parity.worlds import Reference
from unidist.testing.processes import ProcessFailedError, ProcessWorld

_seen: list[object] = []


def remember(value: object) -> None:
    _seen.append(value)


def identity(factor: int) -> tuple[int, str, str, list[object]]:
    print("printed in the middle of it")
    return int(os.environ["RANK"]) * factor, os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"], _seen


def fail_in(index: int) -> str:
    if int(os.environ["RANK"]) == index:
        raise ValueError(f"broken on purpose in {index}")
    return "fine"


def fail_in_one_and_hang_in_the_other() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the cause")
    time.sleep(600)


def end_in(index: int) -> None:
    if int(os.environ["RANK"]) == index:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def jax_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("JAX_") or name == "RANK"}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_by_process_and_the_processes_stay_for_the_next_call() -> None:
    with ProcessWorld(3, setup=remember, setup_args=("set up",), timeout=60) as world:
        pids = world.pids
        first, second = world.call(identity, 10), world.call(f"{__name__}:identity", factor=2)
        assert [row[0] for row in first] == [0, 10, 20]
        assert [row[0] for row in second] == [0, 2, 4]
        assert {row[1] for row in first} == {"3"}
        assert len({row[2] for row in first}) == 1
        assert all(row[3] == ["set up"] for row in first)
        assert world.pids == pids
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


def test_a_failure_comes_back_with_its_traceback_and_leaves_the_world_usable() -> None:
    with ProcessWorld(2, timeout=60) as world:
        pids = world.pids
        with pytest.raises(ProcessFailedError, match=r"process 1 of 2: ValueError: broken on purpose in 1") as caught:
            world.call(fail_in, 1)
        assert "in fail_in" in str(caught.value)
        assert (caught.value.index, caught.value.kind) == (1, "ValueError")
        assert world.outcomes(fail_in, 1)[0].value == "fine"
        assert world.pids == pids


def test_a_failure_is_told_before_those_who_wait_for_it() -> None:
    with ProcessWorld(2, timeout=60) as world:
        world.call(identity, 1)
        world.timeout = 3
        with pytest.raises(ProcessFailedError, match="the cause"):
            world.call(fail_in_one_and_hang_in_the_other)
        assert world.pids == ()


def test_a_killed_process_is_told_with_its_last_words_and_the_next_call_starts_anew() -> None:
    with ProcessWorld(2, timeout=60) as world:
        before = world.pids
        with pytest.raises(ProcessFailedError, match=r"(?s)ended with exit code -9.*last words"):
            world.call(end_in, 1)
        assert not any(alive(pid) for pid in before)
        assert [row[0] for row in world.call(identity, 1)] == [0, 1]
        assert world.pids != before


def test_a_hanging_call_is_ended_after_the_timeout() -> None:
    with ProcessWorld(2, timeout=60) as world:
        world.call(identity, 1)
        world.timeout = 1.5
        pids, began = world.pids, time.monotonic()
        with pytest.raises(ProcessFailedError, match=r"(?s)did not answer in time.*in hang"):
            world.call(hang)
        assert time.monotonic() - began < 30
        assert not any(alive(pid) for pid in pids)


def hang_once(path: str) -> str:
    """Hangs where the file is not there yet."""
    if os.path.exists(path):
        return "answered"
    with open(path, "w"):
        time.sleep(600)
    return "hung"


def test_a_reference_that_hangs_is_started_once_more_and_a_warning_says_so(tmp_path: Path) -> None:
    with Reference(1, timeout=60) as world:
        (first,) = world.pids
        world.timeout = 1.5
        with pytest.warns(UserWarning, match="A reference hung"):
            outcomes = world.outcomes(hang_once, str(tmp_path / "hung"))
        assert not alive(first)
        assert outcomes[0].value == "answered"
        # What hangs twice, or fails, is a failure.
        with pytest.warns(UserWarning, match="A reference hung"):
            assert world.outcomes(hang)[0].failure is not None
        failure = world.outcomes(fail_in, 0)[0].failure
        assert failure is not None
        assert failure.kind == "ValueError"


@pytest.mark.skipif(shutil.which("gdb") is None, reason="what it prints is only asked for where it is installed")
def test_a_debugger_says_where_a_process_is_outside_of_python() -> None:
    with ProcessWorld(1, timeout=60, debugger=True) as world:
        world.start()
        world.timeout = 1.5
        with pytest.raises(ProcessFailedError, match="did not answer in time") as caught:
            world.call(hang)
    assert "Thread 1" in str(caught.value)
    assert re.search(r"#\d+ .*(nanosleep|select|pause)", str(caught.value)), caught.value


def test_a_failing_setup_ends_every_process() -> None:
    world = ProcessWorld(2, setup=fail_in, setup_args=(0,), timeout=60)
    with pytest.raises(ProcessFailedError, match="broken on purpose in 0"):
        world.start()
    assert world.pids == ()


def test_the_environment_is_the_launchers_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    with ProcessWorld(2, launcher="jax", env={"JAX_NUM_CPU_DEVICES": "2"}, timeout=60) as world:
        rows = world.call(jax_variables)
    assert [row["JAX_PROCESS_ID"] for row in rows] == ["0", "1"]
    assert {row["JAX_NUM_CPU_DEVICES"] for row in rows} == {"2"}
    assert all("RANK" not in row for row in rows)


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    world = ProcessWorld(1)
    with pytest.raises(ValueError, match="module-level function"):
        world.call(lambda: None)
