"""The gate before each collective: processes say over TCP that they have come, and go on together.

DTensor's collectives wait without limit, and cannot be interrupted, for a process that is alive and does not come. So
none begins before all its processes are there. Process 0 keeps the gate: each process says to what it has come and with
whom, and hears that all are there, that they have come to different things, or that one of them is gone. The cost is
one small message there and back for each collective, and for each step of a compiled model.

Messages are lines of JSON: {"come", "of"} to process 0, {"late"} where nothing was heard in time; from it {"go"},
{"differ"}, {"gone"} or {"missing"}.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from unidist import events
from unidist.algebra import Axes
from unidist.backends.joining import lost
from unidist.backends.lines import Line
from unidist.backends.noting import Kinds, Noted, told
from unidist.errors import DesyncError, ProcessLostError

# Process 0 answers a process that has given up at once, whatever its own program does.
_ANSWER = 3.0

Members = tuple[int, ...]
Tell = Callable[[dict[str, Any]], None]


@dataclass
class _Book:
    """Holds what process 0 knows.

    Attributes:
        tell: how each process is informed.
        come: members -> process -> what it has come to.
        gone: process -> what became of it.
    """

    tell: dict[int, Tell]
    come: dict[Members, dict[int, str]] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self, process: int, members: Members, what: str) -> None:
        with self.lock:
            gone = {other: self.gone[other] for other in members if other in self.gone}
            if gone:
                self.tell[process]({"gone": list(gone.items())})
                return
            present = self.come.setdefault(members, {})
            present[process] = what
            if len(present) == len(members):
                del self.come[members]
                same = len(set(present.values())) == 1
                for other in members:
                    self.tell[other]({"go": True} if same else {"differ": sorted(present.items())})

    def give_up(self, process: int, members: Members) -> None:
        """A process waits no longer: it gets to know who is missing, and the missing when they come."""
        with self.lock:
            present = self.come.get(members, {})
            if process not in present:
                return  # It was reported already.
            del present[process]
            self.gone[process] = "waited for the others in vain"
            self.tell[process]({"missing": [other for other in members if other not in {*present, *self.gone}]})

    def lose(self, process: int) -> None:
        with self.lock:
            self.gone.setdefault(process, "has ended")
            for members in [key for key in self.come if process in key]:
                for other in self.come.pop(members):
                    self.tell[other]({"gone": [(process, self.gone[process])]})


class Gate:
    """This process's side of the gate; process 0 keeps it as well.

    Attributes:
        timeout: seconds to wait for the others.
    """

    def __init__(self, index: int, count: int, lines: dict[int, Line], timeout: float) -> None:
        """lines: process 0 has one to each other process, they have one to process 0."""
        self.timeout = timeout
        self._index = index
        self._count = count
        self._lines = lines
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()
        self._closing = False
        self._kinds = Kinds()
        self._book: _Book | None = None
        if index == 0:
            self._book = _Book({0: self._told.put, **{other: _by(line) for other, line in lines.items()}})
            for other, line in lines.items():
                keeper = threading.Thread(target=self._serve, args=(self._book, other, line), daemon=True)
                keeper.name = f"unidist-gate-{other}"
                keeper.start()

    def _serve(self, book: _Book, other: int, line: Line) -> None:
        while (message := line.hear(None)) is not None:
            if "come" in message:
                book.arrive(other, tuple(message["of"]), message["come"])
            elif "late" in message:
                book.give_up(other, tuple(message["late"]))
        if not self._closing:
            book.lose(other)

    def come(
        self, what: str, processes: Collection[int], ranks: tuple[int, ...], noted: str = "", axes: Axes = ()
    ) -> None:
        """Returns when all the processes have come to the same.

        From now until then it is noted in this process's record (unidist.flight).

        Args:
            what: what this process has come to.
            processes: those that take part; nothing is to be waited for where this is the only one.
            ranks: those that take part, for errors.
            noted: what the record says, where that is something else.
            axes: that it goes over, for the record.

        Raises:
            ProcessLostError: one of them has ended, or did not come within `timeout` seconds.
            DesyncError: they have come to different things.
        """
        members = tuple(sorted(set(processes)))
        if members == (self._index,) or self._index not in members:
            return
        named, purpose = noted or what, events.purpose() if noted else ""
        kind = self._kinds(
            (named, members, axes, purpose),
            lambda: told(named, members, axes=axes, purpose=purpose, members="process"),
        )
        with Noted(kind):
            self._pass(what, members, ranks)

    def _pass(self, what: str, members: Members, ranks: tuple[int, ...]) -> None:
        with self._one_at_a_time:
            verdict = self._verdict(what, members)
        if "go" in verdict:
            return
        if "differ" in verdict:
            each = "; ".join(f"process {process} to {there}" for process, there in verdict["differ"])
            raise DesyncError(
                f"the processes have come to different collectives: {each}. All must come to the same in the same "
                "order, with arrays of the same shapes and dtypes",
                ranks=ranks,
                collective=what,
            )
        raise self._lost(what, verdict)

    def _verdict(self, what: str, members: Members) -> dict[str, Any]:
        if self._book is not None:
            self._book.arrive(0, members, what)
            try:
                return self._told.get(timeout=self.timeout)
            except queue.Empty:
                self._book.give_up(0, members)
                return self._told.get()
        line = self._lines[0]
        line.say(come=what, of=members)
        found = line.hear(self.timeout)
        if found is None:
            line.say(late=members)
            found = line.hear(_ANSWER)
        return {"gone": [(0, "has ended or does not answer")]} if found is None else found

    def _lost(self, what: str, verdict: dict[str, Any]) -> ProcessLostError:
        if "missing" in verdict:
            why = f"processes {verdict['missing']} were not there after {self.timeout:g} s"
        else:
            why = "; ".join(f"process {process} {fate}" for process, fate in verdict["gone"])
        return lost(f"{what} on process {self._index} of {self._count}", why)

    def close(self) -> None:
        """Leaves the gate: the others are informed, where they wait or come."""
        self._closing = True
        for line in self._lines.values():
            line.close()


def _by(line: Line) -> Tell:
    return lambda message: line.say(**message)
