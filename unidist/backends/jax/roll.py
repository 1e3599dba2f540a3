"""The roll: processes find each other before JAX starts, and notice afterwards when one of them ends.

JAX aborts a process whose world does not come together, and one whose peer died, after a while and without an
exception. So the processes meet first, over plain TCP, and the connections stay: a process that ends closes its own,
whatever ended it. Process 0 hears that at once and informs the others.

Messages are lines of JSON: while the world lasts {"lost"} from process 0; {"bye": true} from whoever leaves in good
order.
"""

from __future__ import annotations

import threading

from unidist.backends.lines import Line
from unidist.backends.meeting import meet


class Roll:
    """The connections of a world that has come together.

    Attributes:
        coordinator: "host:port" for JAX's own service, which process 0 shall start.
        lost: the processes that have ended without leaving.
        is_broken: whether a process is known to be lost, by this or by a collective that failed.
        given_up: why this process waits no longer for another, once it has waited in vain.
    """

    def __init__(self, index: int, lines: dict[int, Line], coordinator: str) -> None:
        self.coordinator = coordinator
        self.lost: set[int] = set()
        self.is_broken = False
        self.given_up = ""
        self._index = index
        self._lines = lines
        self._closing = False
        for other, line in lines.items():
            threading.Thread(target=self._listen, args=(other, line), daemon=True, name="unidist-roll").start()

    def _listen(self, other: int, line: Line) -> None:
        while (message := line.hear(None)) is not None:
            if "bye" in message:
                return
            if "lost" in message:
                self._lose(int(message["lost"]))
        if not self._closing:
            self._lose(other)
            for another, next_line in self._lines.items():
                if self._index == 0 and another != other:
                    next_line.say(lost=other)

    def _lose(self, other: int) -> None:
        self.lost.add(other)
        self.is_broken = True

    def close(self) -> None:
        """Leaves in good order."""
        self._closing = True
        for line in self._lines.values():
            line.say(bye=True)
            line.close()


def call(address: str, count: int, index: int, timeout: float) -> Roll:
    """Waits until all `count` processes are at `address`, where process 0 listens. See `meeting.meet`."""
    places, lines = meet(address, count, index, timeout)
    return Roll(index, lines, places[0])
