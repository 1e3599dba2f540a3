"""Member: the line of a node's launcher to the run's keeper on node 0 (keeper.py has the messages)."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from unidist.backends import door
from unidist.backends.lines import Line
from unidist.launch.attempt import Others
from unidist.launch.keeper import FAILED, SILENCE
from unidist.launch.request import LaunchError

_RETRY = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """Says how a node's attempt ended.

    Attributes: those of `Ended` (attempt.py), and these.
        leaves: whether this launcher itself was asked to end.
        absent: of `done`, those that never joined.
    """

    code: int
    what: str
    has_failed: bool
    is_consequence: bool
    leaves: bool
    progress: int
    late: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    is_silent: bool = False
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Go:
    """An attempt begins: its number, process 0's port, how many nodes take part, and this one's number."""

    attempt: int
    port: int
    nodes: int
    node: int


@dataclass(frozen=True, slots=True)
class Next:
    """Another attempt follows, after a pause: the restart's number, 0 where it is none, and what failed."""

    number: int
    pause: float
    what: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run ends."""

    code: int
    what: str


class Member(Others):
    """A node's line to the keeper.

    Args:
        place: (host, port) of the keeper.
        words: what this node was asked to run (`Terms`, and its `node`).
        timeout: seconds without a word after which the keeper is lost, and for which it is looked for.
    """

    def __init__(self, place: tuple[str, int], words: dict[str, Any], timeout: float) -> None:
        self._place, self._words, self._timeout = place, words, timeout
        self._line: Line | None = None
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._saying = threading.Lock()
        self._heard = 0.0
        self._stop: str | None = None
        self._leave = False
        self._absent: dict[int, float] = {}

    @property
    def address(self) -> str:
        host, port = self._place
        return f"{host}:{port}"

    @property
    def stop(self) -> str | None:
        """Why the attempt must end now, or None."""
        if self._stop is None and self._line is not None and time.monotonic() - self._heard > self._timeout:
            self._stop = f"node 0 at {self.address} gave no answer for {self._timeout:g} s"
        return self._stop

    @property
    def leave(self) -> bool:
        return self._leave

    @property
    def absent(self) -> dict[int, float]:
        return dict(self._absent)

    def start(self, patience: float | None = None) -> Go | Finish:
        """Finds the keeper, and waits until all nodes are there.

        Args:
            patience: seconds for which it is looked for; None: the timeout.

        Raises:
            LaunchError: this node does not belong to the run.
        """
        patience = self._timeout if patience is None else patience
        deadline = time.monotonic() + patience
        failure: object = "nobody listens there"
        while time.monotonic() < deadline:
            self.close()
            try:
                line = self._connect(deadline)
            except OSError as error:
                failure = error
                time.sleep(_RETRY)
                continue
            found = self._admitted(line)
            if isinstance(found, Go | Finish):
                return found
            failure = found or "it has gone"
        self.close()
        return Finish(FAILED, f"node 0 was not found at {self.address} within {patience:g} s ({failure})")

    def again(self) -> Go | Finish:
        """This node is ready for the next attempt: waits until all are."""
        self._stop, self._leave, self._absent = None, False, {}
        self._say(again=True)
        message = self._next(("go", "finish"), None)
        return self.start() if message is None else _follows(message)

    def failed(self, what: str) -> None:
        """Something has failed here: all others shall end."""
        self._say(failed=what[:2000])

    def ended(self, report: Report, patience: float | None = None) -> Next | Finish | None:
        """Reports how the attempt ended here, and waits for what follows. None: the keeper is lost.

        Where the attempt failed a keeper that says nothing is not waited for as long as one whose nodes still train.
        """
        self._say(gone={**asdict(report), "what": report.what[:2000]})
        silence = min(self._timeout, SILENCE) if report.code else self._timeout
        message = self._next(("again", "finish"), patience, silence)
        if message is None or "finish" in message:
            return None if message is None else Finish(**message["finish"])
        return Next(**message["again"])

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._stop, self._leave, self._absent = None, None, False, {}

    # the line ---------------------------------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> Line:
        seconds = max(0.1, min(5.0, deadline - time.monotonic()))
        return Line(socket.create_connection(self._place, timeout=seconds))

    def _admitted(self, line: Line) -> Go | Finish | str | None:
        """Returns what follows; or why this node shall try again."""
        self._line, self._told, self._heard = line, queue.SimpleQueue(), time.monotonic()
        door.knock(line, **self._words)
        threading.Thread(target=self._listen, args=(line, self._told), name="unidist-node", daemon=True).start()
        threading.Thread(target=self._live, args=(line,), name="unidist-node", daemon=True).start()
        message = self._next(("go", "finish", "refused", "busy"), None)
        if message is None:
            return None
        if "refused" in message:
            self.close()
            raise LaunchError(f"node 0 at {self.address} does not take this node: {message['refused']}")
        if "busy" in message:
            time.sleep(1.0)
            return str(message["busy"])
        return _follows(message)

    def _say(self, **message: Any) -> None:
        with self._saying:
            if self._line is not None:
                self._line.say(**message)

    def _listen(self, line: Line, told: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        while (message := line.hear(None)) is not None:
            self._heard = time.monotonic()
            if "stop" in message:
                self._stop = str(message["stop"])
            elif "leave" in message:
                self._leave = True
            elif "absent" in message:
                self._absent |= {int(rank): self._heard for rank in message["absent"]}
            elif "beat" not in message:
                told.put(message)
        if self._line is line:
            self._stop = self._stop or f"node 0 at {self.address} has gone"
        told.put(None)

    def _live(self, line: Line) -> None:
        while self._line is line:
            self._say(beat=True)
            time.sleep(min(1.0, self._timeout / 5))

    def _next(
        self, kinds: tuple[str, ...], patience: float | None, silence: float | None = None
    ) -> dict[str, Any] | None:
        """The next message of these kinds; None where the keeper is lost, or `patience` seconds are over.

        Args:
            silence: seconds without a word after which it is lost; None: the timeout.
        """
        begun = time.monotonic()
        while patience is None or time.monotonic() - begun < patience:
            with contextlib.suppress(queue.Empty):
                message = self._told.get(timeout=0.1)
                if message is None:
                    return None
                if any(kind in message for kind in kinds):
                    return message
            if time.monotonic() - self._heard > (silence or self._timeout):
                return None
        return None


def _follows(message: dict[str, Any]) -> Go | Finish:
    if "go" in message:
        return Go(**message["go"])
    return Finish(**message["finish"])
