"""Keeper: on node 0, keeps several nodes' launchers together: all start, all end, all start again.

Each launcher has a line to the keeper, node 0's own too (nodes.py). Messages are lines of JSON.

| a node says | the keeper says |
|---|---|
| `ready`: what it was asked to run | `refused`: why it does not belong here |
| | `busy`: a node of this number is here |
| | `go`: the attempt's number and port, the nodes and this one's number, when all nodes are ready, or enough |
| `beat`, a few times in its timeout | `beat` |
| | `leave`: why trainings shall save and leave, when a node comes while fewer than all go on |
| `failed`: something has failed here | `stop`: why, to all, at the first failure or when a node is lost |
| `gone`: how its attempt ended, when nothing of it runs | `absent`: of its ranks, those that never joined, to all |
| | `again` or `finish`: what follows, when all are gone |
| `again`: it is ready for the next attempt | |
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unidist.backends import door
from unidist.backends.desync import ranks_text
from unidist.backends.lines import Line
from unidist.flight.form import LEFT
from unidist.launch.causes import TOO_SOON
from unidist.launch.restarts import GivenUp, Restarts

# Messages from each node, with None where its line has closed.
News = tuple[int, Line, dict[str, Any] | None]
# What a node that is lost, or never comes, is to a run.
FAILED = 1
# Seconds without a word after which a node is lost, where something has failed: it is waited for to end, and says each
# second that it is there.
SILENCE = 15.0
_TICK = 0.1


@dataclass
class _Node:
    line: Line
    heard: float
    is_ready: bool = True
    gone: dict[str, Any] | None = None
    failed: float = math.inf


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that all nodes must have been asked for alike.

    Attributes:
        nodes, processes: counts; processes are those of each node.
        backend: its name.
        timeout: seconds without a word after which a node is lost, and for which nodes are waited for.
        restarts: how many are allowed.
        fewest: nodes with which the run goes on where others do not come in time; None: all.
    """

    nodes: int
    processes: int
    backend: str
    timeout: float
    restarts: int
    fewest: int | None = None

    def objection(self, said: dict[str, Any]) -> str:
        """Why a node that says this does not belong here; "" where it does."""
        for name in ("nodes", "processes", "backend"):
            if said.get(name) != getattr(self, name):
                return f"it was started with {name} {said.get(name)!r}, and node 0 with {getattr(self, name)!r}"
        number = said.get("node")
        if type(number) is not int or not 0 <= number < self.nodes:
            return f"its node rank {number!r} is not one of 0 to {self.nodes - 1}"
        return ""


class Keeper:
    """The keeper of a run.

    Args:
        server: a listening socket, which the keeper closes.
        terms: what the run is.
        find_port: gives a port of this machine that is free for process 0.
        say: is given a line for whoever reads what node 0 prints.
    """

    def __init__(
        self, server: socket.socket, terms: Terms, find_port: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._terms, self._find_port, self._say = terms, find_port, say
        self._server = server
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        # Of the attempt that is under way, and those that have come since.
        self._nodes: dict[int, _Node] = {}
        self._newcomers: dict[int, _Node] = {}
        # By their ranks in this attempt: where a node is missing, those behind it are counted on.
        self._taking_part: list[int] = list(range(terms.nodes))
        self._restarts = Restarts(terms.restarts)
        self._attempt = 0
        self._first_errors: dict[int, tuple[int, str]] = {}
        self._lost: dict[int, str] = {}
        self._is_closed = self._is_growing = self._is_stopping = False
        self._guests = threading.Thread(target=self._receive, name="unidist-door", daemon=True)
        self._guests.start()
        self._thread = threading.Thread(target=self._keep, name="unidist-keeper", daemon=True)
        self._thread.start()

    def close(self, patience: float = 5.0) -> None:
        """Waits until the nodes know how the run ends, and ends the keeper."""
        self._thread.join(patience)
        self._is_closed = True
        self._guests.join()
        for node in (*self._nodes.values(), *self._newcomers.values()):
            node.line.close()
        while not self._news.empty():
            self._news.get()[1].close()

    # who comes --------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        with (
            self._server as server,
            contextlib.closing(door.guests(server, math.inf, lambda: self._is_closed)) as guests,
        ):
            for line, said, address in guests:
                self._admit(line, said, address)

    def _admit(self, line: Line, said: dict[str, Any], address: str) -> None:
        if objection := self._terms.objection(said):
            self._say(f"a launcher at {address} was sent away: {objection}")
            line.say(refused=objection)
            line.close()
            return
        threading.Thread(target=self._listen, args=(int(said["node"]), line, said), daemon=True).start()

    def _listen(self, number: int, line: Line, said: dict[str, Any]) -> None:
        self._news.put((number, line, {"ready": said}))
        while (message := line.hear(None)) is not None:
            self._news.put((number, line, message))
        self._news.put((number, line, None))

    # the run ----------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        follows = True
        while follows:
            if not self._gather():
                return
            port = self._find_port()
            for number, node in self._nodes.items():
                node.is_ready, node.gone, node.failed = False, None, math.inf
                place = {"nodes": len(self._taking_part), "node": self._taking_part.index(number)}
                node.line.say(go={"attempt": self._attempt, "port": port, **place})
            self._run()
            follows = self._decide()

    def _gather(self) -> bool:
        deadline = time.monotonic() + self._terms.timeout
        while True:
            self._nodes |= self._newcomers
            self._newcomers.clear()
            here = sorted(number for number, node in self._nodes.items() if node.is_ready)
            is_late = time.monotonic() > deadline
            fewest = self._terms.fewest or self._terms.nodes
            if len(here) == self._terms.nodes or (is_late and len(here) >= fewest and here[0] == 0):
                self._begin(here)
                return True
            if is_late:
                why = f"{self._missing(here)} did not come within {self._terms.timeout:g} s"
                if self._first_errors:
                    why = f"{self._first_errors[max(self._first_errors)][1]}; then {why}"
                self._tell(finish={"code": FAILED, "what": why})
                return False
            self._hear()

    def _begin(self, here: list[int]) -> None:
        self._lost.clear()
        self._taking_part = here
        for number in [number for number in self._nodes if number not in here]:
            self._nodes.pop(number).line.close()
        if len(here) < self._terms.nodes:
            self._say(
                f"{self._missing(here)} did not come: the run goes on with {len(here)} of {self._terms.nodes} nodes"
            )

    def _missing(self, here: list[int]) -> str:
        return ", ".join(self._name(number) for number in range(self._terms.nodes) if number not in here)

    def _name(self, node: int) -> str:
        if node not in self._taking_part:
            return f"node {node}"
        first = self._taking_part.index(node) * self._terms.processes
        return f"node {node} ({ranks_text(range(first, first + self._terms.processes))})"

    def _run(self) -> None:
        self._is_stopping = self._is_growing = False
        while any(node.gone is None for node in self._nodes.values()):
            why = self._hear()
            if why and not self._is_stopping:
                self._is_stopping = True
                self._tell(stop=why)
            elif self._newcomers and not self._is_stopping and not self._is_growing:
                self._is_growing = True
                self._tell(leave=f"{', '.join(map(self._name, self._newcomers))} has come")

    def _hear(self) -> str:
        """Hears what came, or a tick. Returns why all must stop, or ""."""
        with contextlib.suppress(queue.Empty):
            number, line, message = self._news.get(timeout=_TICK)
            return self._heard(number, line, message)
        now, why = time.monotonic(), ""
        # Where something has failed a node says each second that it is there.
        patience = min(self._terms.timeout, SILENCE) if self._is_stopping else self._terms.timeout
        for number, node in [*self._nodes.items(), *self._newcomers.items()]:
            node.line.say(beat=True)
            if now - node.heard > patience:
                why = why or self._lose(number, f"gave no answer for {now - node.heard:.0f} s")
        return why

    def _heard(self, number: int, line: Line, message: dict[str, Any] | None) -> str:
        if message is not None and "ready" in message:
            return self._arrived(number, line)
        known = self._of(number, line)
        if known is None:
            return ""
        if message is None:
            return self._lose(number, "has gone")
        known.heard = time.monotonic()
        if "gone" in message:
            known.gone = message["gone"]
            if absent := message["gone"].get("absent"):
                self._tell(absent=absent)
        known.is_ready |= "again" in message
        if "failed" not in message:
            return ""
        known.failed = min(known.failed, known.heard)
        return str(message["failed"])

    def _of(self, number: int, line: Line) -> _Node | None:
        found = (nodes.get(number) for nodes in (self._nodes, self._newcomers))
        return next((node for node in found if node is not None and node.line is line), None)

    def _arrived(self, number: int, line: Line) -> str:
        known, why = self._newcomers.get(number) or self._nodes.get(number), ""
        if known is not None and time.monotonic() - known.heard < min(5.0, self._terms.timeout):
            line.say(busy=f"{self._name(number)} is here already")
            line.close()
            return ""
        if known is not None:
            why = self._lose(number, "was started anew")
        self._newcomers[number] = _Node(line, time.monotonic())
        return why

    def _lose(self, number: int, how: str) -> str:
        if (newcomer := self._newcomers.pop(number, None)) is not None:
            newcomer.line.close()
            return ""
        self._nodes.pop(number).line.close()
        self._lost[number] = f"{self._name(number)} {how}"
        return self._lost[number]

    def _tell(self, **message: Any) -> None:
        for node in self._nodes.values():
            node.line.say(**message)

    # what follows -----------------------------------------------------------------------------------------------------

    def _decide(self) -> bool:
        """Informs all nodes of what follows. Whether another attempt does."""
        ended = sorted(self._nodes.values(), key=lambda node: node.failed)
        reports = [node.gone for node in ended if node.gone is not None]
        failed = [report for report in reports if report.get("has_failed")]
        leaving = [report for report in reports if report.get("leaves")]
        if leaving or not (failed or self._lost):
            best = leaving[0] if leaving else {"code": 0, "what": ""}
            self._tell(finish={"code": best["code"], "what": best["what"]})
            return False
        if self._is_growing and not self._lost and all(report["code"] == LEFT for report in failed):
            self._attempt += 1
            self._tell(again={"number": 0, "pause": 0.0, "what": "a node has come: the trainings have saved"})
            return True
        self._first_errors[self._attempt] = code, what = self._first(failed)
        follows = self._restarts.after(max((int(report.get("progress", 0)) for report in reports), default=0))
        if isinstance(follows, GivenUp):
            last = what
            code, what = self._first_errors[follows.attempt]
            why = f"{follows.why}; the first failure was: " if follows.why else ""
            if last != what:
                why = f"the last failure was: {last}; {why}"
            self._tell(finish={"code": code, "what": f"{why}{what}"})
            return False
        self._attempt += 1
        self._tell(again={"number": follows.number, "pause": follows.pause, "what": what})
        return True

    def _first(self, failed: list[dict[str, Any]]) -> tuple[int, str]:
        causes = [report for report in failed if not report.get("is_consequence")]
        # What is silent may wait, in C, for what has ended.
        if causes and not (self._all("done") and all(report.get("is_silent") for report in causes)):
            return int(causes[0]["code"]), str(causes[0]["what"])
        if self._lost:
            return FAILED, "; ".join(self._lost.values())
        code, what = int(failed[0]["code"]), str(failed[0]["what"])
        for kind, how in (("done", TOO_SOON), ("late", "did not come")):
            if found := self._all(kind):
                return code, f"{ranks_text(found)} {how}: {what}"
        return code, what

    def _all(self, kind: str) -> list[int]:
        return [rank for _, node in sorted(self._nodes.items()) if node.gone for rank in node.gone.get(kind, ())]
