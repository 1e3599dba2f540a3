"""`unidist run --max-restarts` with real processes: what is started again, how, and what is left of it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch import restarting
from tests.launch.runs import alive, finish, pids, run, start, wait_until
from unidist.launch import Request, restarts
from unidist.launch import run as launch_run
from unidist.launch.request import free_port

pytestmark = pytest.mark.processes


def program(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def test_a_forked_process_is_as_a_new_one(tmp_path: Path) -> None:
    """Environment, streams, session, signals, arguments, stack, random numbers: seen from inside and in /proc."""
    script = program(tmp_path, restarting.FACTS)
    done = run(["-n", "2", "--backend", "jax", "--max-restarts", "1", script, "--epochs", "3", "-x"], tmp_path)
    facts = {path.stem: json.loads(path.read_text()) for path in sorted(tmp_path.glob("facts-*.json"))}
    assert set(facts) == {f"facts-{rank}-{attempt}" for rank in (0, 1) for attempt in (0, 1)}
    drawn = [fact.pop("drawn") for fact in facts.values()]
    for rank in (0, 1):
        new, forked = facts[f"facts-{rank}-0"], facts[f"facts-{rank}-1"]
        assert {name: (new[name], forked[name]) for name in new if new[name] != forked[name]} == {}
    assert len({value for pair in drawn for value in pair}) == 8
    assert done.code == 1
    assert done.of_rank(0) == ["to standard output"] * 2
    assert done.err.count("[0] to standard error") == 2


def test_a_training_goes_on_in_forked_processes(tmp_path: Path) -> None:
    """Of two nodes, each of which has a server of its own."""
    script, address = program(tmp_path, restarting.TRAINING), f"127.0.0.1:{free_port()}"
    both = ["-n", "1", "--nodes", "2", "--backend", "jax", "--max-restarts", "1", "--address", address]
    nodes = [start([*both, "--node-rank", str(node), script], tmp_path) for node in (0, 1)]
    ended = [finish(node) for node in nodes]
    for rank, done in enumerate(ended):
        assert done.code == 0, done.err
        words = done.of_rank(rank)[-1].split()
        assert words[:4] == ["forked", "True", "steps", "6"]
        assert float(words[5]) < 1e-6
    # Those of the training that was not interrupted count too.
    last = ended[0].err.splitlines()[-1]
    assert re.match(r"unidist: started in [\d.]+ s, then goodput \d+%: .* in 24 steps that count;", last)


@pytest.mark.parametrize("killed", [["launcher"], ["launcher", "server"], ["server"]], ids=" and ".join)
def test_nothing_of_a_restart_is_left(killed: list[str], tmp_path: Path) -> None:
    """Children in groups and sessions of their own neither, nor the records' folder."""
    script = program(tmp_path, restarting.HANGS_LATER)
    process = start(["-n", "2", "--backend", "jax", "--max-restarts", "1", "--grace", "0.5", script], tmp_path)
    wait_until(lambda: len(pids(tmp_path)) == 7 or process.poll() is not None, "two ranks, their children, the server")
    found = pids(tmp_path)
    try:
        assert len(found) == 7
        assert all(alive(pid) for pid in found)
        folder = Path((tmp_path / "folder.txt").read_text())
        assert folder.is_dir()
        for name in killed:
            os.kill(process.pid if name == "launcher" else int((tmp_path / "server.pid").read_text()), signal.SIGKILL)
        wait_until(lambda: not any(map(alive, found)), "the end of all", 10)
        wait_until(lambda: not folder.exists(), "the end of the folder", 5)
    finally:
        for pid in filter(alive, found):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if "launcher" in killed else 1)


def attempts(most: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    """(exit code, what was said) of a program that fails in each attempt."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(restarts, "_PAUSE", 0.3)
    command = (program(folder, restarting.FAILS_AGAIN), *arguments)
    err = io.StringIO()
    code = launch_run(Request(backend="jax", command=command, max_restarts=most), out=io.StringIO(), err=err)
    return code, err.getvalue().splitlines()


def test_a_run_that_comes_no_further_ends_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    code, said = attempts(9, tmp_path, monkeypatch)
    seconds = time.monotonic() - begun
    assert code == 40
    assert [line for line in said if "restart " in line] == [
        "unidist: restart 1 of 9, from checkpoint 1 (3 steps were made)",
        "unidist: restart 2 of 9, in 0.3 s, from checkpoint 1 (3 steps were made)",
        "unidist: restart 3 of 9, in 0.6 s, from checkpoint 1 (3 steps were made)",
    ]
    last = said.index("unidist: 3 restarts in a row brought the training no further; the first failure was:")
    # It may be another one, which no restart mends.
    lately = "rank 0 of 1 failed first, with exit code 43: [0] ValueError: in attempt 3"
    assert said[last - 1] == f"unidist: the last failure was: {lately}"
    assert said[last + 1] == "unidist: rank 0 of 1 failed first, with exit code 40; its traceback:"
    assert said[-1] == "[0] ValueError: in attempt 0"
    # The pauses before restarts are part of the time.
    goodput = re.search(r"of ([\d.]+) s in 0 steps that count; ", "\n".join(said))
    assert goodput is not None
    assert seconds - float(goodput[1]) < 0.6


def test_a_run_without_restarts_left_ends_with_the_error_that_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt came further than the one before: its error was another."""
    code, said = attempts(2, tmp_path, monkeypatch, "further")
    assert code == 42
    assert [line for line in said if "restart " in line] == [
        "unidist: restart 1 of 2, from the beginning (3 steps were made)",
        "unidist: restart 2 of 2, from the beginning (4 steps were made)",
        "unidist: no restart is left of 2; the first failure was:",
    ]
    assert said[-1] == "[0] ValueError: in attempt 2"
    assert not any("the last failure" in line for line in said)
