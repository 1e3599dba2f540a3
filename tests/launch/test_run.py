"""`unidist run` with real processes: worlds that work, ranks that fail, people who stop it. Nothing stays behind."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import programs
from tests.launch.runs import alive, finish, only_prefixed, pids, run, start, wait_until
from unidist.launch import Request
from unidist.launch import run as launch_run
from unidist.launch.attempt import GIVEN_UP
from unidist.launch.request import free_port

pytestmark = pytest.mark.processes
# torchrun's agent, and the launcher that starts JAX's ranks and Horovod's.
BACKENDS = ("torch", "jax")
WORKS = {"torch": programs.TORCH, "jax": programs.JAX, "horovod": programs.HOROVOD}
FAILS = {"torch": programs.TORCH_FAILS, "jax": programs.JAX_FAILS, "horovod": programs.HOROVOD_FAILS}


def program(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def all_ended(folder: Path, count: int) -> bool:
    found = pids(folder)
    assert len(found) == count
    return not any(alive(pid) for pid in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_world_that_works(backend: str, tmp_path: Path) -> None:
    script = program(tmp_path, WORKS[backend])
    virtual = ["--devices-per-process", "3"] if backend == "jax" else []
    done = run(["-n", "2", "--backend", backend, *virtual, script, "--epochs", "3", "-n", "7"], tmp_path)
    assert done.code == 0, done.err
    assert only_prefixed(done.out)
    for rank in (0, 1):
        said = done.of_rank(rank)
        assert "sum 3.0 of 2 arguments ['--epochs', '3', '-n', '7']" in said
        assert f"name __main__ train.py {backend} {backend}" in said
        assert f"[{rank}] said on standard error" in done.err.splitlines()
        assert "said on standard error" not in done.out
        assert ("devices 3 6" in said) == bool(virtual)


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(programs.TELLS)
    done = run(["-n", "2", "--backend", "jax", "-m", "package.train", "x"], tmp_path)
    assert done.code == 0, done.err
    for rank in (0, 1):
        assert done.of_rank(rank) == ["name __main__ train.py jax jax", "arguments ['x']"]


def test_a_program_that_ends_where_it_has_joined_is_not_aborted(tmp_path: Path) -> None:
    """On torch a thread was inside the world's store then, and took the process down with SIGABRT."""
    script = program(tmp_path, "import unidist\nunidist.use()\nprint('joined', unidist.process_count())\n")
    address = f"127.0.0.1:{free_port()}"
    asked = ["-n", "1", "--nodes", "2", "--backend", "torch", "--address", address]
    nodes = [finish(one) for one in [start([*asked, "--node-rank", str(k), script], tmp_path) for k in range(2)]]
    assert [done.code for done in nodes] == [0, 0], [done.err for done in nodes]
    assert [done.of_rank(rank) for rank, done in enumerate(nodes)] == [["joined 2"], ["joined 2"]]


@pytest.mark.parametrize(("backend", "each"), [("torch", 1), ("jax", 1), ("horovod", 2)])
def test_two_nodes_meet_at_the_address(backend: str, each: int, tmp_path: Path) -> None:
    script = program(tmp_path, WORKS[backend])
    address = f"127.0.0.1:{free_port()}"
    nodes = [
        start(
            [*("-n", str(each), "--backend", backend, "--nodes", "2", "--node-rank", k), "--address", address, script],
            tmp_path,
        )
        for k in ("1", "0")
    ]
    second, first = (finish(node) for node in nodes)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    count = 2 * each
    for done, ranks in ((first, range(each)), (second, range(each, count))):
        for rank in ranks:
            assert f"sum {count * (count + 1) / 2} of {count} arguments []" in done.of_rank(rank)


@pytest.mark.parametrize(
    ("backend", "waiting"), [("torch", "in a collective"), ("jax", "in a collective"), ("jax", "sleep")]
)
def test_a_rank_that_raises_ends_all_and_its_traceback_is_last(backend: str, waiting: str, tmp_path: Path) -> None:
    text = FAILS[backend] if waiting == "in a collective" else programs.PLAIN_FAILS
    done = run(["-n", "3", "--backend", backend, program(tmp_path, text), waiting], tmp_path)
    assert done.code == 1
    lines = [line.replace("[1] [rank1]: ", "[1] ") for line in done.err.splitlines()]
    assert lines[-1] == "[1] RuntimeError: on rank 1"
    summary = next(k for k, line in enumerate(lines) if line.startswith("unidist: "))
    assert lines[summary].startswith("unidist: rank 1 of 3 failed first, with exit code 1")
    shown = lines[summary + 1 :]
    assert shown[0] == "[1] Traceback (most recent call last):"
    assert "[1] ValueError: the cause" in shown
    assert all(line.startswith("[1] ") for line in shown)
    assert not any("runpy" in line or "program.py" in line for line in shown)
    assert all_ended(tmp_path, 9)
    assert done.seconds < 60


@pytest.mark.parametrize(
    ("backend", "how", "code", "said"),
    [("torch", "exit", 41, "exit code 41"), *((backend, "kill", 137, "signal SIGKILL") for backend in BACKENDS)],
)
def test_the_exit_code_is_kept(backend: str, how: str, code: int, said: str, tmp_path: Path) -> None:
    # JAX's processes end each other where one is lost; the others' sleep on.
    text = FAILS[backend] if backend == "jax" else programs.PLAIN_FAILS
    done = run(["-n", "2", "--backend", backend, program(tmp_path, text), how, "sleep"], tmp_path)
    assert done.code == code
    assert f"rank 1 of 2 failed first, with {said}" in done.err
    assert all_ended(tmp_path, 6)


@pytest.mark.parametrize(
    ("backend", "number", "code"),
    [*((backend, signal.SIGINT, 130) for backend in BACKENDS), ("jax", signal.SIGTERM, 143)],
)
def test_a_signal_to_the_launcher_ends_all(backend: str, number: int, code: int, tmp_path: Path) -> None:
    process = start(["-n", "2", "--backend", backend, program(tmp_path, programs.HANGS)], tmp_path)
    wait_until(lambda: len(pids(tmp_path)) == 6, "two ranks and their children")
    assert all(alive(pid) for pid in pids(tmp_path))
    process.send_signal(number)
    done = finish(process, 30)
    assert done.code == code
    assert done.err.splitlines()[-1] == f"unidist: {signal.Signals(number).name}: all processes were ended"
    assert "Traceback" not in done.err
    assert all_ended(tmp_path, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_launcher_that_is_killed_takes_all_with_it(backend: str, tmp_path: Path) -> None:
    """With what stands between, at the same time: nobody is left who could end the ranks."""
    process = start(["-n", "2", "--backend", backend, program(tmp_path, programs.HANGS), "stubborn"], tmp_path)
    wait_until(lambda: len(pids(tmp_path)) == 6, "two ranks and their children")
    between = {psutil.Process(int((tmp_path / f"rank{k}.pid").read_text())).ppid() for k in (0, 1)}
    process.kill()
    for pid in between - {process.pid}:
        os.kill(pid, signal.SIGKILL)
    try:
        wait_until(lambda: all_ended(tmp_path, 6), "ranks without a launcher", 10)
    finally:
        for pid in filter(alive, pids(tmp_path)):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_do_not_listen_are_killed_after_the_grace(backend: str, tmp_path: Path) -> None:
    script = program(tmp_path, programs.HANGS)
    process = start(["-n", "2", "--backend", backend, "--grace", "1.5", script, "stubborn"], tmp_path)
    wait_until(lambda: len(pids(tmp_path)) == 6, "two ranks and their children")
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = finish(process, 30)
    assert time.monotonic() - asked > 1.4
    assert done.code == 130
    assert all_ended(tmp_path, 6)


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    script = program(tmp_path, programs.HANGS)
    process = start(["-n", "2", "--backend", "jax", "--grace", "100", script, "stubborn"], tmp_path)
    wait_until(lambda: len(pids(tmp_path)) == 6, "two ranks and their children")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process, 20).code == 130
    assert all_ended(tmp_path, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_children_that_a_successful_program_left_are_ended(backend: str, tmp_path: Path) -> None:
    done = run(["-n", "2", "--backend", backend, program(tmp_path, programs.LEAVES_A_CHILD)], tmp_path)
    assert done.code == 0, done.err
    assert all_ended(tmp_path, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lines_stay_whole(backend: str, tmp_path: Path) -> None:
    done = run(["-n", "3", "--backend", backend, program(tmp_path, programs.PRINTS)], tmp_path)
    assert done.code == 0, done.err
    assert only_prefixed(done.out)
    for rank in range(3):
        said = done.of_rank(rank)
        assert said[:200] == [f"{rank} says {k} grüße" for k in range(200)]
        assert said[200:] == ["not text: \ufffd", "a last line without an end"]


def test_output_comes_while_the_program_runs(tmp_path: Path) -> None:
    process = start(["-n", "1", "--backend", "jax", program(tmp_path, programs.HANGS)], tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] ready\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finish(process, 30).code == 143
    assert all_ended(tmp_path, 3)


def test_a_caller_that_gives_up_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = Request(backend="jax", command=(program(tmp_path, programs.HANGS),), processes=2)
    out, err = io.StringIO(), io.StringIO()

    def give_up() -> str | None:
        return "both are ready" if out.getvalue().count("ready") == 2 else None

    assert launch_run(request, out=out, err=err, give_up=give_up) == GIVEN_UP
    assert err.getvalue().splitlines()[-1] == "unidist: both are ready: all processes were ended"
    assert all_ended(tmp_path, 6)


def test_a_reader_that_goes_away_ends_all(tmp_path: Path) -> None:
    endless = (
        programs.LEAVE_PIDS + "leave_pids(os.environ['JAX_PROCESS_ID'])\nwhile True: print('line'); time.sleep(0.01)\n"
    )
    process = start(["-n", "2", "--backend", "jax", program(tmp_path, endless)], tmp_path)
    assert process.stdout is not None
    wait_until(lambda: len(pids(tmp_path)) == 6, "two ranks and their children")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr is not None
    process.stderr.close()
    assert all_ended(tmp_path, 6)


WITHOUT_A_WORD = {
    "exit": (41, "failed first, with exit code 41"),
    "done": (1, "ended with exit code 0 before the others were done"),
}


@pytest.mark.parametrize(("backend", "how"), [("horovod", "exit"), ("torch", "done")])
def test_a_rank_that_ends_without_a_word_is_named_before_those_that_miss_it(
    backend: str, how: str, tmp_path: Path
) -> None:
    """The others learn of its end, and their tracebacks come first."""
    script = program(tmp_path, FAILS[backend])
    done = run(["-n", "2", "--backend", backend, script, how, "in a collective"], tmp_path)
    code, said = WITHOUT_A_WORD[how]
    assert done.code == code, done.err
    assert f"rank 1 of 2 {said}" in done.err
    assert all_ended(tmp_path, 6)


def test_a_rank_that_ends_after_those_that_miss_it_is_named(tmp_path: Path) -> None:
    """Its traceback is there and its connections are closed, but it has not ended when the others have."""
    done = run(["-n", "2", "--backend", "torch", program(tmp_path, FAILS["torch"]), "ends late"], tmp_path)
    assert "Connection" in done.err
    assert "rank 1 of 2 failed first, with exit code 1" in done.err
    assert done.code == 1
    assert done.err.splitlines()[-1] == "[1] RuntimeError: on rank 1"
    assert all_ended(tmp_path, 6)


JOINS_ALONE = """
import unidist
from unidist.backends import environment

if environment.detect().process_index == 0:
    unidist.use("jax")
"""


def test_a_rank_of_another_node_that_ends_before_it_joins_is_missed_at_once(tmp_path: Path) -> None:
    """Each launcher sees the processes of its own node alone."""
    script = program(tmp_path, JOINS_ALONE)
    wanted = ("--backend", "jax", "-n", "1", "--nodes", "2", "--address", f"127.0.0.1:{free_port()}", "--timeout", "40")
    nodes = [finish(node) for node in [start([*wanted, "--node-rank", k, script], tmp_path) for k in ("1", "0")]]
    for done in nodes:
        assert done.code == 124
        assert done.seconds < 30
        said = [line for line in done.err.splitlines() if line.startswith("unidist: ")][-1]
        assert said.startswith("unidist: rank 1 did not come to ")
        assert "; rank 1 ended with exit code 0 before the others were done" in said
