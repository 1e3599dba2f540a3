"""A pytest plugin: how long each file of tests takes, and which begin first.

Files come in the order of ci/durations.json, the longest first, so that no worker is left with a long one at the end;
those of tests/unit come before all others, as a mistake shows there soonest. Two workers compute; a third one takes the
files that mostly wait, for processes to start, to end or to be missed. What a run took is printed by folder, and how
fast the machine was meanwhile. The file named by the variable TIMES, if there is one, gets it by file, and for how
long workers waited for worlds to start.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from unidist.testing.processes import ProcessWorld

DURATIONS = Path(__file__).parent / "durations.json"
FIRST = "tests/unit/"
# The worker that takes what waits, and the share of all workers' seconds that its files took. One that stands in for a
# worker that has died has another name, and takes any file.
THIRD, WAITING = "gw2", 0.32


@dataclass
class Spent:
    """Seconds, of a clock and of the cores: of the worker, and of all processes that it started."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)


class Speed:
    """How long a loop of Python takes a core, tried again and again: others share the machine, and it is not always as
    fast."""

    STEPS, SECONDS = 200_000, 15.0

    def __init__(self) -> None:
        self.tries: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self.SECONDS if self.tries else 0.0):
            began, found = time.thread_time(), 0
            for step in range(self.STEPS):
                found += step * step % 7
            self.tries.append(time.thread_time() - began)

    def end(self) -> dict[str, float]:
        """Milliseconds of the loop: the best try, and the mean of all."""
        self._ended.set()
        self._thread.join()
        return {"best": 1000 * min(self.tries), "mean": 1000 * sum(self.tries) / len(self.tries)}


class Scheduling(LoadFileScheduling):
    """Gives whole files, in their order: those that mostly wait to the third worker, until the others have no more."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = self._next_for(node)
        if file is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: WorkerController) -> str | None:
        if node.gateway.id == THIRD:
            return next((file for file in self.workqueue if file in waiting()), None)
        return next((file for file in self.workqueue if file not in waiting()), next(iter(self.workqueue)))


@functools.cache
def known() -> dict[str, dict[str, float]]:
    files: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text())["files"] if DURATIONS.exists() else {}
    return files


@functools.cache
def waiting() -> frozenset[str]:
    """Returns the files that used the smallest shares of a core, which is less where more workers share the cores."""
    files = sorted(known().items(), key=lambda one: one[1]["cpu"] / max(one[1]["wall"], 0.1))
    left, found = WAITING * sum(took["wall"] for _, took in files), []
    for name, took in files:
        left -= took["wall"]
        if left < 0:
            break
        found.append(name)
    return frozenset(found)


class Timing:
    """What this process spent on each file, and what the workers that it started say of theirs."""

    def __init__(self) -> None:
        self.files: dict[str, Spent] = {}
        self.starting = 0.0
        self.speed: Speed | None = None
        self._file: str | None = None
        self._since = Spent()
        self._began = time.monotonic()

    # a worker -----------------------------------------------------------------------------------------------------

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def turn(item: pytest.Item) -> tuple[bool, float]:
            file = file_of(item)
            # Of a new one nobody knows how long it takes: it is not left for the end either.
            return not file.startswith(FIRST), -known().get(file, {"wall": math.inf})["wall"]

        items.sort(key=turn)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if file_of(item) != self._file:
            self._turn_to(file_of(item))
        result = yield
        if nextitem is None:
            self._turn_to(None)
        return result

    def _turn_to(self, file: str | None) -> None:
        now = Spent(time.monotonic(), spent_by_all())
        if self._file is not None:
            took = Spent(now.wall - self._since.wall, now.cpu - self._since.cpu)
            self.files[self._file] = self.files.get(self._file, Spent()) + took
        self._file, self._since = file, now

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["files"] = {name: asdict(spent) for name, spent in self.files.items()}
            output["starting"] = self.starting

    # the process that is asked for the tests ----------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduling | None:
        return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.starting += output.get("starting", 0.0)
        for name, spent in output.get("files", {}).items():
            self.files[name] = self.files.get(name, Spent()) + Spent(**spent)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.files:
            return
        took = time.monotonic() - self._began
        speed = self.speed.end() if self.speed is not None else {}
        if target := os.environ.get("TIMES"):
            files = {name: asdict(spent) for name, spent in self.files.items()}
            Path(target).write_text(
                json.dumps({"seconds": took, "starting": self.starting, "files": files, "loop": speed})
            )
        terminalreporter.section("minutes by folder (a worker's clock; all cores)")
        for name, spent in sorted(by_folder(self.files).items(), key=lambda row: -row[1].wall):
            terminalreporter.write_line(f"{spent.wall / 60:6.2f} {spent.cpu / 60:6.2f}  {name}")
        cores = sum(spent.cpu for spent in self.files.values()) / 60
        loop = ", ".join(f"{kind} {milliseconds:.0f} ms" for kind, milliseconds in speed.items())
        terminalreporter.write_line(f"{took / 60:6.2f} {cores:6.2f}  all; a loop of Python took a core: {loop or '-'}")
        longest = sorted(self.files.items(), key=lambda row: -row[1].wall)[:10]
        terminalreporter.section("the longest files")
        for name, spent in longest:
            terminalreporter.write_line(f"{spent.wall / 60:6.2f} {spent.cpu / 60:6.2f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    timing = Timing()
    # Not in a process that runs tests: they may count its threads.
    if getattr(config.option, "numprocesses", None):
        timing.speed = Speed()
    config.pluginmanager.register(timing, "timing")
    start = ProcessWorld.start

    @functools.wraps(start)
    def timed(world: ProcessWorld) -> None:
        began = time.monotonic()
        start(world)
        timing.starting += time.monotonic() - began

    ProcessWorld.start = timed  # type: ignore[method-assign]


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def by_folder(files: dict[str, Spent]) -> dict[str, Spent]:
    found: dict[str, Spent] = {}
    for name, spent in files.items():
        folder = name.rpartition("/")[0]
        found[folder] = found.get(folder, Spent()) + spent
    return found


def spent_by_all() -> float:
    """Seconds of cores that this process has used, those that it started, and those that they did."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            total += sum(process.cpu_times()[:4])
    return total
