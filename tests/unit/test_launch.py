"""The launcher without worlds: what processes are given, what a run comes to, how processes end. Jobs are planted."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unidist
from unidist.backends import environment, registry
from unidist.backends.door import TOKEN
from unidist.backends.environment import timeout, without_launcher
from unidist.errors import CapabilityError
from unidist.launch import LaunchError, Request, ending, jobs, program, run, together
from unidist.launch.attempt import GIVEN_UP
from unidist.launch.console import Console
from unidist.launch.jobs import Failure, Job
from unidist.launch.request import INTERFACES, LOOPBACK_INTERFACE, split_address

COMMAND = ("-m", "this")

# what processes are given


def told(backend: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[dict[str, str]]:
    """The environment of each process that a job would start."""
    seen: list[dict[str, str]] = []

    def start(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        seen.append(env)
        return SimpleNamespace(pid=0, poll=lambda: 0)

    monkeypatch.setattr(jobs.subprocess, "Popen", start)  # type: ignore[attr-defined]
    job = registry.job(backend)(Request(backend=backend, command=COMMAND, **how))
    job.start({"HOME": "/root"}, Console(io.StringIO(), io.StringIO()))
    return seen


SECOND_NODE = {"processes": 3, "nodes": 2, "node_rank": 1, "address": "node0:1234"}


def test_jax_on_the_second_node(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told("jax", monkeypatch, **SECOND_NODE, devices_per_process=2)
    assert [env["JAX_PROCESS_ID"] for env in seen] == ["3", "4", "5"]
    assert [env["JAX_LOCAL_PROCESS_ID"] for env in seen] == ["0", "1", "2"]
    assert [env["JAX_LOCAL_DEVICE_IDS"] for env in seen] == ["0,1", "2,3", "4,5"]
    for env in seen:
        assert (env["JAX_COORDINATOR_ADDRESS"], env["JAX_NUM_PROCESSES"]) == ("node0:1234", "6")
        assert (env["JAX_NUM_CPU_DEVICES"], env["HOME"]) == ("2", "/root")
        assert "JAX_COORDINATOR_BIND_ADDRESS" not in env
        assert not [name for name in without_launcher(env) if name.startswith(("JAX_PROC", "JAX_LOCAL", "JAX_COORD"))]


def test_jax_on_one_node_listens_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = told("jax", monkeypatch, processes=2)
    assert first["JAX_COORDINATOR_BIND_ADDRESS"] == first["JAX_COORDINATOR_ADDRESS"]
    assert first["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert second["JAX_COORDINATOR_ADDRESS"] == first["JAX_COORDINATOR_ADDRESS"]
    assert (first["JAX_LOCAL_DEVICE_IDS"], second["JAX_LOCAL_DEVICE_IDS"]) == ("0", "1")


def test_tensorflow_on_the_second_node(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told("tensorflow", monkeypatch, **SECOND_NODE, devices_per_process=2)
    assert [env["RANK"] for env in seen] == ["3", "4", "5"]
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1", "2"]
    for env in seen:
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["UNIDIST_CPU_DEVICES"]) == ("6", "3", "2")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node0", "1234")


def test_a_third_party_s_processes_are_told_by_the_variables_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's where its entry names none."""
    monkeypatch.setattr(environment, "_LAUNCHERS", dict(environment.launchers()))
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    wired = environment.Launcher(name="wired", count="W_SIZE", index="W_RANK", address=("W_AT",), local_index="W_LOCAL")
    by_us = "unidist.launch:LocalProcesses"
    unidist.register("wired", "a.b:C", job=by_us, launcher=wired)
    unidist.register("plain", "a.b:C", job=by_us)
    unidist.register("apart", "a.b:C")
    last = told("wired", monkeypatch, **SECOND_NODE)[-1]
    assert {name: last[name] for name in wired.names} == {
        "W_SIZE": "6",
        "W_RANK": "5",
        "W_AT": "node0:1234",
        "W_LOCAL": "2",
    }
    assert not set(last) & environment.TORCHRUN.names
    assert int(last["OMP_NUM_THREADS"]) >= 1
    last = told("plain", monkeypatch, **SECOND_NODE)[-1]
    said = ("5", "6", "2", "3", "node0", "1234")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert tuple(last[name] for name in names) == said
    with pytest.raises(LaunchError, match="plain has one device a process"):
        told("plain", monkeypatch, devices_per_process=2)
    for name, how in (("apart", "with its own launcher"), ("sim", "start the script with python")):
        with pytest.raises(CapabilityError, match=f"does not start '{name}': .*{how}"):
            run(Request(backend=name, command=COMMAND))


def test_the_last_port_is_65535() -> None:
    assert split_address("[fe80::1]:65535") == ("fe80::1", 65535)
    for text in ("a:65536", "a:0", "a:-1", ":80", "a"):
        with pytest.raises(LaunchError, match=r"must be host:port with a port of 1\.\.65535"):
            split_address(text)


# what a run comes to


class Planted(Job):
    """Starts nothing, and comes to what is planted."""

    found: list[Failure] | None = None
    ended_well: Sequence[int] = ()
    words: Mapping[int, bytes] = {}
    environ: Mapping[str, str] = {}
    polls = 0

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        Planted.environ = environ
        for local_index in range(self.request.processes):
            out, err = console.attach(self.request.rank(local_index))
            os.write(err, self.words.get(local_index, b""))
            os.close(out)
            os.close(err)

    def poll(self) -> list[Failure] | None:
        self.polls += 1
        assert self.polls < 100, "nobody ended this run"
        return self.found

    def done(self) -> list[int]:
        return list(self.ended_well)


def plant(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A backend's job is the planted one; what it requires is installed."""
    planted = replace(registry.entry(backend), job=f"{__name__}:Planted", requires=())
    monkeypatch.setitem(registry._entries, backend, planted)


def come_to(
    found: list[Failure] | None, monkeypatch: pytest.MonkeyPatch, backend: str = "jax", reason: str | None = None
) -> tuple[int, str]:
    """The exit code of a run of two processes, and what it says."""
    plant(monkeypatch, backend)
    monkeypatch.setattr(Planted, "found", found)
    request, err = Request(backend=backend, command=COMMAND, processes=2), io.StringIO()
    return run(request, out=io.StringIO(), err=err, give_up=lambda: reason), err.getvalue()


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([], 0, ""),
        ([Failure(1, 41)], 41, "unidist: rank 1 of 2 failed first, with exit code 41; the others were ended; it said"),
        ([Failure(0, -9)], 137, "unidist: rank 0 of 2 failed first, with signal SIGKILL; the others were ended; it"),
        (
            [Failure(None, 3)],
            3,
            "unidist: what starts the processes, or where they meet, ended with exit code 3; what it said",
        ),
        (None, GIVEN_UP, "unidist: it takes too long: all processes were ended\n"),
    ],
    ids=str,
)
def test_the_exit_code_and_the_last_word(
    found: list[Failure] | None, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = come_to(found, monkeypatch, reason="it takes too long" if found is None else None)
    assert got[0] == code
    assert got[1].startswith(said)
    assert bool(got[1]) == bool(said)


def test_a_rank_that_ended_well_too_soon_is_named_and_how_another_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = b"Traceback (most recent call last):\n  ...\nunidist.errors.ProcessLostError: gone\n"
    monkeypatch.setattr(Planted, "ended_well", [1])
    monkeypatch.setattr(Planted, "words", {0: lost})
    said = "rank 1 of 2 ended with exit code 0 before the others were done; the others were ended; rank 0's traceback:"
    told = "".join(f"[0] {line}\n" for line in lost.decode().splitlines())
    begun = time.monotonic()
    code, text = come_to([Failure(0, 1)], monkeypatch)
    assert (code, text) == (1, f"{told}unidist: {said}\n{told}")
    # There is no other process that could be waited for.
    assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize(
    ("backend", "shell", "keras"),
    [
        ("torch", None, "torch"),
        ("torch", "jax", "torch"),
        ("tensorflow", "torch", "tensorflow"),
        ("horovod", None, "torch"),
        ("horovod", "tensorflow", "tensorflow"),
        ("horovod", "jax", "torch"),
    ],
)
def test_keras_runs_on_what_the_shell_says_where_the_backend_serves_it(
    backend: str, shell: str | None, keras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if shell is not None:
        monkeypatch.setenv("KERAS_BACKEND", shell)
    monkeypatch.setenv("RANK", "7")
    come_to([], monkeypatch, backend)
    assert (Planted.environ["UNIDIST_BACKEND"], Planted.environ["KERAS_BACKEND"]) == (backend, keras)
    assert "RANK" not in Planted.environ


def at_once(
    request: Request, attempts: Any, console: Console, received: Sequence[int], give_up: Callable[[], str | None]
) -> int:
    """In place of together.go: no other node is waited for."""
    attempts.attempt(request, give_up)
    return 0


def test_each_run_of_one_node_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "jax")
    monkeypatch.setattr(together, "go", at_once)
    monkeypatch.setattr(Planted, "found", [])
    monkeypatch.setenv(TOKEN, "of all nodes")
    seen = []
    for nodes in (1, 1, 2):
        request = Request(backend="jax", command=COMMAND, nodes=nodes, address="node0:1")
        run(request, out=io.StringIO(), err=io.StringIO())
        seen.append(Planted.environ[TOKEN])
    assert len(set(seen)) == 3
    assert [len(token) for token in seen[:2]] == [64, 64]
    assert seen[2] == "of all nodes"


def test_one_node_s_connections_are_at_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    plant(monkeypatch, "jax")
    monkeypatch.setattr(together, "go", at_once)
    monkeypatch.setattr(Planted, "found", [])
    for nodes, told in ((1, [LOOPBACK_INTERFACE] * 2), (2, [None, None])):
        request = Request(backend="jax", command=COMMAND, nodes=nodes, address="node0:1")
        run(request, out=io.StringIO(), err=io.StringIO())
        assert [Planted.environ.get(name) for name in INTERFACES] == told
    monkeypatch.setenv(INTERFACES[0], "eth7")
    run(Request(backend="jax", command=COMMAND), out=io.StringIO(), err=io.StringIO())
    assert Planted.environ[INTERFACES[0]] == "eth7"


def test_a_timeout_is_told_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "jax")
    monkeypatch.setattr(Planted, "found", [])
    run(Request(backend="jax", command=COMMAND, timeout=7.5), out=io.StringIO(), err=io.StringIO())
    assert timeout(Planted.environ) == 7.5
    run(Request(backend="jax", command=COMMAND), out=io.StringIO(), err=io.StringIO())
    assert timeout(Planted.environ) == 300
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(LaunchError, match="timeout must be seconds above 0"):
            Request(backend="jax", command=COMMAND, timeout=wrong)


# how processes end


def own(name: str) -> str:
    """A name for a run of these tests: others at the same time would end each other's."""
    return f"{name} of {os.getpid()}"


def sleeper(how: str, *runs: str) -> subprocess.Popen[bytes]:
    """A shell of these runs, the outermost first, that waits."""
    environ = dict(os.environ)
    for run_id in runs:
        ending.mark(environ, run_id)
    text = f"trap {how} TERM; echo ready; while :; do sleep 0.02; done"
    child = subprocess.Popen(["bash", "-c", text], env=environ, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.stdout.close()
    return child


def ended(child: subprocess.Popen[bytes], run_id: str, grace: float, *deaf: int) -> int | None:
    """How it ends when its run is; None where that takes longer than 10 seconds."""
    arguments = (run_id, [child.pid], lambda: child.poll() is None, grace, lambda: False, lambda: deaf)
    worker = threading.Thread(target=ending.end, args=arguments, daemon=True)
    worker.start()
    worker.join(10.0)
    code = child.poll()
    child.kill()
    child.wait()
    return code


def test_who_listens_ends_by_itself_and_who_does_not_is_killed() -> None:
    polite, stubborn = own("polite"), own("stubborn")
    assert ended(sleeper("'sleep 0.2; exit 5'", polite), polite, 9.0) == 5
    assert ended(sleeper("''", stubborn), stubborn, 0.2) == -signal.SIGKILL


def test_who_hears_of_nothing_is_killed_at_once() -> None:
    """Those of the run, that is: a number may be another's by now."""
    ours, another = own("deaf"), own("another")
    child, bystander = sleeper("''", ours), sleeper("''", another)
    assert ended(child, ours, 60.0, child.pid, bystander.pid) == -signal.SIGKILL
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_what_is_stopped_ends_as_soon_as_what_is_not() -> None:
    stopped = own("stopped")
    child = sleeper("'exit 5'", stopped)
    os.kill(child.pid, signal.SIGSTOP)
    assert ended(child, stopped, 60.0) == 5


def test_a_run_inside_another_belongs_to_both() -> None:
    outer, inner = own("outer run"), own("inner run")
    child = sleeper("''", outer, inner)
    found = [child.pid in ending.marked(name) for name in (outer, inner, own("run"), own("outer"))]
    assert ended(child, outer, 0.0) == -signal.SIGKILL
    assert found == [True, True, False, False]


HANGS_AT_ITS_EXIT = "import atexit, sys, time\natexit.register(time.sleep, 60)\nprint(sys.argv[1:])\n"


def test_a_failed_program_is_not_kept_by_its_exit_handlers(tmp_path: Path) -> None:
    ways = {"raise ValueError('mine')": 1, "sys.exit(41)": 41, "sys.exit('words')": 1}
    children = []
    for k, how in enumerate(ways):
        (tmp_path / f"way{k}.py").write_text(HANGS_AT_ITS_EXIT + how)
        command = [sys.executable, program.__file__, f"way{k}.py", "-x"]
        children.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        said = [child.communicate(timeout=20) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == list(ways.values())
    assert [out for out, _ in said] == [b"['-x']\n"] * 3
    assert b"runpy" not in said[0][1]
    assert said[0][1].endswith(b"ValueError: mine\n")


@pytest.mark.parametrize(("end", "failed"), [("raise OSError", True), ("raise SystemExit(3)", True), ("0", False)])
def test_exit_handlers_can_tell_that_the_program_has_failed(end: str, failed: bool, tmp_path: Path) -> None:
    """A process over Horovod that failed does not wait for the others, which would take it for something else."""
    told = "import atexit; from unidist.backends.ending import has_failed; atexit.register(lambda: print(has_failed()))"
    (tmp_path / "way.py").write_text(f"{told}\n{end}\n")
    done = subprocess.run([sys.executable, program.__file__, "way.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{failed}\n", done.stderr


@pytest.mark.parametrize(("end", "code"), [("raise OSError", 1), ("raise SystemExit(41)", 41), ("0", 0)])
def test_a_process_on_jax_keeps_its_exit_code(end: str, code: int, tmp_path: Path) -> None:
    """It ends at once where its program has failed, before JAX's own handlers."""
    told = "from unidist.backends.jax.joining import at_exit; at_exit(lambda: False)"
    (tmp_path / "way.py").write_text(f"{told}\n{end}\n")
    assert subprocess.run([sys.executable, program.__file__, "way.py"], cwd=tmp_path).returncode == code
