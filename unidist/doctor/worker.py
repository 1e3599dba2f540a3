"""Runs each process of the world: `-m unidist.doctor.worker TASK`, started by the launcher.

It joins the world as any program does, sends known values over each link and over the whole world, compares what comes,
and reports to the command by lines of its standard output.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from unidist import array
from unidist.algebra import Layout, Mesh
from unidist.array import DistributedArray
from unidist.backends import registry
from unidist.backends.environment import detect
from unidist.backends.protocol import Array, Cluster, DistributionBackend
from unidist.doctor import versions
from unidist.doctor.links import LARGE, MARK, SMALL, Pair, Task, difference, pairs, pattern

AXIS = "rank"
Report = dict[str, Any]
_POLL = 0.05
_LATE = 3


def main(arguments: Sequence[str]) -> None:
    """Joins, measures, reports."""
    task = Task.read(arguments[0])
    registry.find(task.backend)  # a launcher of a third party's is known from here on
    launch = detect()
    index = 0 if launch is None else launch.process_index
    told: list[Report] = [_facts(index, 1 if launch is None else launch.process_count)]
    say(**told[0])
    watch, begun = Watch(index, task.linger), time.monotonic()
    with watch.step("import", task.importing):
        registry.load(task.backend)
    # The adapter's own words, which may name the process that is missing, come before the watch's.
    with watch.step("join", task.joining + 2 * task.linger):
        adapter = registry.use(task.backend, cluster=Cluster(timeout=task.joining))
        devices = adapter.list_devices()
        adapter.barrier()
        joined = {"clock": time.time(), "seconds": time.monotonic() - begun, "devices": devices}
    told.append({"what": "joined", "process": index, "ranks": list(adapter.local_ranks()), **joined})
    say(**told[-1])
    world = _World(adapter, task)
    for pair in pairs(world.size):
        with watch.step(f"link {pair[0]}-{pair[1]}", task.timeout):
            told += _told(index, world.link(pair))
    for what, check in world.checks.items():
        with watch.step(f"world {what}", task.timeout):
            told += _told(index, check())
    with watch.step("world exchange of results", task.timeout):
        every = world.exchange(told)
    if index % task.processes == 0:
        say(what="all", process=index, reports=every)
    with watch.step("leave", task.timeout):
        registry.shutdown()


def _told(index: int, reports: Sequence[Report]) -> list[Report]:
    whole = [{**report, "process": index} for report in reports]
    for report in whole:
        say(**report)
    return whole


def _facts(index: int, count: int) -> Report:
    return {
        "what": "facts",
        "process": index,
        "count": count,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": versions.installed(),
    }


class _World:
    """The ranks that have joined, and what is sent among them.

    Every process calls the same methods in one order.
    """

    def __init__(self, adapter: DistributionBackend, task: Task) -> None:
        self._adapter, self._task = adapter, task
        self.size = len(adapter.list_devices())
        self._here = adapter.local_ranks()
        self._mesh = Mesh({AXIS: self.size})
        self._messages = {
            length: array.from_local([pattern(rank, length) for rank in self._here], self._mesh, Layout(AXIS))
            for length in (SMALL, LARGE)
        }
        self.checks: Mapping[str, Callable[[], list[Report]]] = {
            "all_gather": self._gathered,
            "all_reduce": self._reduced,
        }

    def link(self, pair: Pair) -> list[Report]:
        """Sends between both ends at once, compares what comes, then times it: one report for each end here.

        Seconds are those of one such exchange, small or large, as a program sees it, Python included.
        """
        wrong: dict[int, str] = {}
        seconds = {}
        for length, times in ((SMALL, self._task.small), (LARGE, self._task.large)):
            for rank, values in self._swapped(length, pair).shards().items():
                other = pair[0] + pair[1] - rank
                if rank in pair and (how := difference(_host(values), pattern(other, length))):
                    wrong.setdefault(rank, f"rank {rank} got from rank {other}: {how}")
            found = _timed(lambda n=length: self._swapped(n, pair), times)  # type: ignore[misc]
            # What a link can carry is its best time; how late it is, its usual one.
            seconds[length] = median(found) if length == SMALL else min(found)
        return [
            {
                "what": "link",
                "pair": list(pair),
                "rank": rank,
                "wrong": wrong.get(rank),
                "latency": seconds[SMALL],
                "bandwidth": LARGE * 4 / seconds[LARGE],
            }
            for rank in pair
            if rank in self._here
        ]

    def _swapped(self, length: int, pair: Pair) -> DistributedArray:
        return array.permute(self._messages[length], AXIS, [pair, (pair[1], pair[0])])

    def _gathered(self) -> list[Report]:
        rows = self._messages[SMALL].numpy().reshape(self.size, SMALL)
        wrong = [f"rank {k}'s part: {d}" for k, row in enumerate(rows) if (d := difference(row, pattern(k, SMALL)))]
        return [{"what": "world", "op": "all_gather", "wrong": "; ".join(wrong) or None}]

    def _reduced(self) -> list[Report]:
        length = LARGE
        mine = [pattern(rank, length) for rank in self._here]
        partial = array.from_local(mine, self._mesh, Layout(partial=(AXIS,)))
        total = sum(pattern(rank, length) for rank in range(self.size))
        wrong = [
            f"on rank {rank}: {found}"
            for rank, values in array.all_reduce(partial).shards().items()
            if (found := difference(_host(values), np.asarray(total)))
        ]
        seconds = min(_timed(lambda: array.all_reduce(partial), self._task.large))
        return [{"what": "world", "op": "all_reduce", "wrong": "; ".join(wrong) or None, "seconds": seconds}]

    def exchange(self, told: Sequence[Report]) -> list[Report]:
        """The reports of all processes, on every process."""
        text = np.frombuffer(json.dumps(list(told)).encode(), np.uint8).astype(np.int32)
        longest = max(int(n) for n in self._joined(np.array([len(text)], np.int32)))
        rows = self._joined(np.pad(text, (0, longest - len(text)))).reshape(self.size, longest)
        # A process reports in the row of its first rank; the rows of its others are empty.
        texts = [bytes(row[row > 0].astype(np.uint8)) for row in rows]
        return [report for text in texts if text for report in json.loads(text)]

    def _joined(self, row: Array) -> Array:
        rows = [row if rank == self._here[0] else np.zeros_like(row) for rank in self._here]
        return array.from_local(rows, self._mesh, Layout(AXIS)).numpy()


# what it tells, and when it ends ------------------------------------------------------------------------------------


def say(**report: Any) -> None:
    """Reports something to the command.

    Writes to the descriptor itself: sys.stdout may hold back what others printed.
    """
    with open(1, "wb", closefd=False) as stream:
        stream.write(f"{MARK}{json.dumps(report)}\n".encode())


def _where() -> str:
    """Returns where the main thread is.

    A process that waits for others is in a collective, one that they wait for is not.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "at its end"
    return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


class Watch:
    """Ends this process where a step takes longer than its limit.

    A collective that waits in C++ for a process that is gone can be ended in no other way.
    """

    def __init__(self, process: int, linger: float) -> None:
        self._process, self._linger = process, linger
        self._step: tuple[str, float, float] | None = None
        threading.Thread(target=self._look, daemon=True).start()

    @contextmanager
    def step(self, name: str, limit: float) -> Iterator[None]:
        """Reports that a step of at most `limit` seconds begins, and what it raises, which passes on."""
        say(what="begun", process=self._process, step=name)
        self._step = (name, limit, time.monotonic() + limit)
        try:
            yield
        except Exception as error:
            self._step = None
            say(what="error", process=self._process, step=name, kind=type(error).__name__, message=str(error))
            time.sleep(self._linger)
            raise
        self._step = None

    def _look(self) -> None:
        while True:
            time.sleep(_POLL)
            step = self._step
            if step is not None and time.monotonic() > step[2]:
                say(what="late", process=self._process, step=step[0], seconds=step[1], where=_where())
                time.sleep(self._linger)
                sys.stdout.flush()
                os._exit(_LATE)


def _host(values: Any) -> Array:
    # torch alone refuses to copy from an accelerator by itself.
    return np.asarray(values.cpu() if hasattr(values, "is_cuda") else values)


def _timed(send: Callable[[], DistributedArray], times: int) -> list[float]:
    """Seconds of each call. The first is not counted: programs are compiled, connections made."""
    found = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        for values in send().shards().values():
            _host(values[:1])  # computed, then: on an accelerator, and in JAX, a call returns before
        found.append(time.perf_counter() - begun)
    return found[1:]


if __name__ == "__main__":
    main(sys.argv[1:])
