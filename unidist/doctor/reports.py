"""Reports: what the processes of the world have sent, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from unidist.doctor.links import MARK, Pair, pairs
from unidist.launch import Request

Report: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A process that did not come to the end of a step: it was late, or something was raised in it."""

    process: int
    step: str
    late: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Holds what is known of a world that has ended.

    Attributes:
        request: what was started.
        told: everything that a process of this node sent, and what it knew of the others.
        code: the launcher's exit code.
        words: the last lines of the standard error of the launcher and its processes.
        launcher: what the launcher itself said of the end; "" where all ended well.
    """

    request: Request
    told: Sequence[Report]
    code: int
    words: Sequence[str] = ()
    launcher: str = ""

    def of(self, what: str, **where: Any) -> Iterator[Report]:
        for report in self.told:
            if report["what"] == what and all(report.get(key) == value for key, value in where.items()):
                yield report

    @cached_property
    def count(self) -> int:
        """The processes of the world, as they know it: nodes may have been started with different numbers."""
        return max((facts["count"] for facts in self.facts.values()), default=self.request.world_size)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The processes of this node."""
        if self.count != self.request.world_size:
            return tuple(sorted({report["process"] for report in self.of("begun")}))  # of others none is known
        return tuple(self.request.rank(k) for k in range(self.request.processes))

    @cached_property
    def facts(self) -> dict[int, Report]:
        return dict(sorted((report["process"], report) for report in self.of("facts")))

    @cached_property
    def joined(self) -> dict[int, Report]:
        return dict(sorted((report["process"], report) for report in self.of("joined")))

    @cached_property
    def size(self) -> int:
        """The number of ranks; 0 where no process has joined."""
        return max((len(report["devices"]) for report in self.joined.values()), default=0)

    @cached_property
    def process_of(self) -> dict[int, int]:
        """Rank -> process, of the processes that are known to have joined."""
        return {rank: process for process, report in self.joined.items() for rank in report["ranks"]}

    @cached_property
    def stops(self) -> tuple[Stop, ...]:
        """The first of each process: what it says after that comes of the others' ends."""
        found: dict[int, Stop] = {}
        for report in self.told:
            late = report["what"] == "late"
            if late or report["what"] == "error":
                text = f"{report.get('kind')}: {report.get('message')}"
                if late:
                    text = f"nothing came for {report['seconds']:g} s {report['where']}"
                stop = Stop(process=report["process"], step=report["step"], late=late, text=text)
                found.setdefault(stop.process, stop)
        return tuple(sorted(found.values(), key=lambda stop: stop.process))

    @cached_property
    def first_stop(self) -> str | None:
        """The step that came first of those that did not end: in later ones others waited."""
        order = ["import", "join", *(f"link {a}-{b}" for a, b in pairs(self.size))]
        stopped = [stop.step for stop in self.stops]
        return min(stopped, key=lambda step: order.index(step) if step in order else len(order), default=None)

    def last_step(self, process: int) -> str | None:
        steps = [report["step"] for report in self.of("begun", process=process)]
        return steps[-1] if steps else None

    def link(self, pair: Pair) -> dict[int, Report]:
        """Rank -> what it found of a link, for its ends that reported."""
        return self._links.get(pair, {})

    @cached_property
    def _links(self) -> dict[Pair, dict[int, Report]]:
        found: dict[Pair, dict[int, Report]] = {}
        for report in self.of("link"):
            first, second = report["pair"]
            found.setdefault((first, second), {})[report["rank"]] = report
        return found

    def place(self, process: int) -> str:
        """ "process 3 (host, pid 1234)"."""
        facts = self.facts.get(process)
        return f"process {process}" if facts is None else f"process {process} ({facts['host']}, pid {facts['pid']})"


def read(text: str) -> list[Report]:
    """The reports among the lines that the launcher passed on."""
    found: dict[str, Report] = {}
    for line in text.splitlines():
        _, mark, rest = line.partition(MARK)
        if mark:
            report = json.loads(rest)
            # What this node's processes reported themselves comes again with what they know of all.
            for one in (report, *report.get("reports", ())):
                found.setdefault(json.dumps(one, sort_keys=True), one)
    return list(found.values())
