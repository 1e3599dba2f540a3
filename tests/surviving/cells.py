"""One cell of the table of faults (table.py), run and looked at."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from tests import preloaded
from tests.launch.runs import alive, environment
from tests.support.hiding import path_with
from tests.support.hosts import Hosts
from tests.surviving.table import BACK, GONE, LOSES_A_NODE, Cell
from tests.visible import OF_KERAS
from unidist.flight.reading import read_all
from unidist.launch.request import free_port
from unidist.testing.processes import ProcessWorld

PROGRAM = Path(__file__).with_name("program.py")
# Seconds: what processes wait for each other, and what a cell may take.
TIMEOUT, LIMIT = 8.0, 200.0
STEPS, EPOCHS = 32, 4
# Seconds that a slow link adds, one way.
SLOW = 0.2
MESSAGES = {
    "SIGKILL": "signal SIGKILL",
    # Without a record, before it joins, nobody knows that it is stopped.
    "SIGSTOP": "is stopped|did not come|holds up",
    "loop": "did not come",
    "exit 0": "exit code 0",
    "exception": "exit code 1",
    "MemoryError": "exit code 1",
    "disk full": "exit code 1",
    "SIGTERM": "asked to leave|signal SIGTERM",
    **dict.fromkeys(LOSES_A_NODE, "has gone"),
}


@dataclass
class Outcome:
    """What became of a cell: what is wrong, or nothing; and seconds.

    Attributes:
        seconds: what the cell took, its reference included where it is the first to need it.
        noticed: from the fault to the line in which the launcher names it, all processes ended; None without a line.
    """

    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    noticed: float | None = None
    lines: list[str] = field(default_factory=list)


def run(cell: Cell, folder: Path) -> Outcome:
    """Runs it, and looks at what came of it."""
    outcome = Outcome()
    begun = time.monotonic()
    reference = undisturbed(cell.backend, cell.world, cell.dropout)
    if cell.world == "two hosts":
        with Hosts(2) as hosts:
            _run(cell, folder, outcome, hosts)
    else:
        _run(cell, folder, outcome, None)
    _judge(cell, folder, outcome, reference)
    outcome.seconds = time.monotonic() - begun
    return outcome


@cache
def undisturbed(backend: str, world: str, dropout: bool = True) -> tuple[np.ndarray, list[str]]:
    """(weights, batches in their order) of a run to which nothing happened. Two hosts compute what one does.

    Without a launcher: its processes find Keras imported, by servers that other tests have too. XLA compiles as it does
    under one.
    """
    if world == "two hosts":
        return undisturbed(backend, "2", dropout)
    cell = Cell("none", "nowhere", backend, world, dropout=dropout)
    keras = "torch" if backend == "horovod" else backend
    env = {name: value for name, value in OF_KERAS[keras].items() if name != "XLA_FLAGS"} | {"UNIDIST_BACKEND": backend}
    if cell.devices:
        env |= {"UNIDIST_CPU_DEVICES": str(cell.devices), "JAX_NUM_CPU_DEVICES": str(cell.devices)}
    with tempfile.TemporaryDirectory() as name:
        launcher = "jax" if backend == "jax" else "torchrun"
        with ProcessWorld(cell.processes, launcher=launcher, env=env, preload=preloaded.KERAS[keras]) as processes:
            processes.call(run_program, name, _told(cell, 0))
        return np.load(Path(name) / "weights.npy"), (Path(name) / "given-0-0").read_text().split()


def run_program(folder: str, told: dict[str, str]) -> None:
    os.environ.update(told)
    sys.argv = [str(PROGRAM), folder]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def _told(cell: Cell, started: int) -> dict[str, str]:
    """The variables that say to the program what happens to it."""
    return {"FAULT": json.dumps(asdict(cell)), "STARTED": str(started), "TF_CPP_MIN_LOG_LEVEL": "3"}


def _run(cell: Cell, folder: Path, outcome: Outcome, hosts: Hosts | None) -> None:
    """Starts the run, and once more where it is to be started from outside."""
    for started in range(2):
        codes = _start(cell, folder, outcome, hosts, started)
        if cell.fault == GONE and codes == [0, -signal.SIGKILL]:
            return
        if codes == [0] * len(codes):
            return
        expected = {"launcher SIGTERM": (75, 143), "launcher SIGKILL": (-9,)}.get(cell.fault)
        if expected is None or codes[0] not in expected:
            outcome.wrong.append(f"exit codes {codes}")
            return


def _start(cell: Cell, folder: Path, outcome: Outcome, hosts: Hosts | None, started: int) -> list[int]:
    nodes = 2 if hosts else 1
    port = 29500 if hosts else free_port()
    processes = [_launch(cell, folder, started, node, nodes, hosts, port) for node in range(nodes)]
    (folder / "launcher").write_text(str(processes[0].pid if nodes == 1 else processes[-1].pid))
    if cell.fault in ("link cut", "link slow") and hosts is not None:
        _disturb(cell.fault, folder, hosts)
    if cell.fault == "launcher SIGKILL" and nodes > 1 and processes[-1].wait(LIMIT) == -9:
        # As a scheduler that starts what it has lost; the other node waits for it.
        processes[-1] = _launch(cell, folder, started, nodes - 1, nodes, hosts, port)
    if cell.fault == BACK and processes[-1].wait(LIMIT) == -signal.SIGKILL:
        _until(lambda: "goes on with 1 of 2" in (folder / f"err-{started}-0").read_text())
        processes[-1] = _launch(cell, folder, started, nodes - 1, nodes, hosts, port)
    said = [folder / f"err-{started}-{node}" for node in range(nodes)]
    _watch(cell, folder, outcome, processes, said)
    codes = []
    for node, process in enumerate(processes):
        if process.poll() is None:
            outcome.wrong.append(f"a hang: node {node} did not end within {LIMIT:g} s")
            process.terminate()
        codes.append(process.wait(30))
        outcome.lines += said[node].read_text().splitlines()
    return codes


def _watch(
    cell: Cell, folder: Path, outcome: Outcome, processes: Sequence[subprocess.Popen[bytes]], said: Sequence[Path]
) -> None:
    """Until all have ended, or the time is over; notes when the fault is first named."""
    deadline, struck = time.monotonic() + LIMIT, folder / "struck"
    message = MESSAGES.get(cell.fault)
    named = re.compile(f"^unidist:.*({message})", re.MULTILINE)
    before: list[int] | None = None
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if message and outcome.noticed is None and struck.exists() and (at := struck.read_text()):
            texts = [path.read_text(errors="replace") for path in said]
            before = before or [len(text) for text in texts]
            if any(named.search(text, length) for text, length in zip(texts, before, strict=True)):
                outcome.noticed = time.time() - float(at)
        time.sleep(0.05)


def _launch(
    cell: Cell, folder: Path, started: int, node: int, nodes: int, hosts: Hosts | None, port: int
) -> subprocess.Popen[bytes]:
    options = ["--backend", cell.backend, "--max-restarts", "3", "--timeout", str(TIMEOUT), "--grace", "20"]
    options += ["--log-dir", str(folder / f"log-{started}")]
    options += ["-n", str(cell.processes // nodes)]
    if cell.devices:
        options += ["--devices-per-process", str(cell.devices)]
    prefix: Sequence[str] = ()
    if hosts is not None:
        prefix = hosts.prefix(node)
        options += ["--min-processes", "1"] if cell.fault in LOSES_A_NODE else []
        options += ["--nodes", str(nodes), "--node-rank", str(node), "--address", f"{hosts.address(0)}:{port}"]
    hiding = path_with("tensorflow") if cell.backend == "tensorflow" else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (hiding, environment()["PYTHONPATH"])))
    env = {**environment(), **_told(cell, started), "PYTHONPATH": path}
    with (folder / f"out-{started}-{node}").open("ab") as out, (folder / f"err-{started}-{node}").open("ab") as err:
        return subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "unidist", "run", *options, str(PROGRAM), str(folder)],
            env=env,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _disturb(fault: str, folder: Path, hosts: Hosts) -> None:
    """Cuts the cable in the middle of the training, or makes it slow, and mends it when both sides must know."""
    given = folder / "given-1-0"
    _until(lambda: given.exists() and len(given.read_text().split()) > 12)
    (folder / "struck").write_text(repr(time.time()))
    if fault == "link cut":
        hosts.cut(1)
    else:
        hosts.slow(1, SLOW)
    time.sleep(TIMEOUT + 5.0)
    hosts.mend(1)


def _until(holds: Callable[[], bool]) -> None:
    """Waits until it holds, or a cell's time is over: what comes of that shows."""
    deadline = time.monotonic() + LIMIT
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


def _judge(cell: Cell, folder: Path, outcome: Outcome, reference: tuple[np.ndarray, list[str]]) -> None:
    text = "\n".join(line for line in outcome.lines if line.startswith("unidist:"))
    named = MESSAGES.get(cell.fault)
    is_named = re.search(rf"ranks? [^\n]*\b{cell.rank}\b", text) or "asked to leave" in text
    if named and not (is_named and re.search(named, text)):
        outcome.wrong.append(f"rank {cell.rank} is not named with {named!r}:\n{text}")
    if cell.fault == "link cut" and "gave no answer" not in text:
        outcome.wrong.append(f"the link is not named:\n{text}")
    if cell.fault == BACK and "a node has come" not in text:
        outcome.wrong.append(f"the node was not taken back:\n{text}")
    if cell.fault == "link slow" and len(_attempts(folder)) > 1:
        outcome.wrong.append(f"a slow link is no failure:\n{text}")
    if not (folder / "struck").exists():
        outcome.wrong.append("the fault never happened")
    if not (folder / "weights.npy").exists():
        outcome.wrong.append("no weights came out")
        return
    weights, given = reference
    difference = float(np.abs(np.load(folder / "weights.npy") - weights).max())
    if not difference <= (1e-5 if cell.fault in LOSES_A_NODE else 1e-6):
        outcome.wrong.append(f"weights differ by {difference:.2g}")
    if (found := _batches(folder, len(given) - STEPS, cell.backend == "tensorflow")) != given:
        outcome.wrong.append(f"batches: {found} instead of {given}")
    resumed = {flight.resumed for attempt in _attempts(folder) for flight in read_all(attempt).values()} - {0}
    if cell.in_memory and not any(step % 5 == 0 for step in resumed):
        outcome.wrong.append(f"the training went on from steps {resumed}, not from one that was in memory")
    if left := [pid for pid in _pids(folder) if alive(pid)]:
        outcome.wrong.append(f"processes {left} are left")


def _attempts(folder: Path) -> list[Path]:
    return sorted(folder.glob("log-*/attempt-*"), key=lambda path: (path.parent.name, int(path.name.split("-")[1])))


def _pids(folder: Path) -> list[int]:
    return [flight.pid for attempt in _attempts(folder) for flight in read_all(attempt).values() if flight.pid]


def _batches(folder: Path, looked_at: int, is_tensorflow: bool) -> list[str]:
    """The batches that count, as process 0 was given them: of each attempt those before the next one went on.

    Args:
        looked_at: how many Keras looks at before a training begins.
    """
    found: list[str] = []
    for path in sorted(folder.glob("given-0-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        number = int(path.name.rpartition("-")[2])
        flights = [read_all(one) for one in _attempts(folder) if _number(one) == number]
        first = next((flight[0] for flight in flights if 0 in flight), None)
        if first is None or not first.steps:
            continue
        given = path.read_text().split()
        # TensorFlow reads again what it passes over of an epoch.
        again = first.resumed % (STEPS // EPOCHS) if is_tensorflow else 0
        found = [*given[:looked_at], *found[looked_at : looked_at + first.resumed], *given[looked_at + again :]]
    return found


def _number(attempt: Path) -> int:
    return int(attempt.name.split("-")[1]) + 100 * int(attempt.parent.name.split("-")[1])
