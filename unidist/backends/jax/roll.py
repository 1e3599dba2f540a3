"""The roll: processes find each other before JAX starts, and notice afterwards when one of them ends.

JAX aborts a process whose world does not come together, and one whose peer died, after a while and without an
exception. So process 0 calls the roll first, over plain TCP, and the connections stay: a process that ends closes its
own, whatever ended it. Process 0 hears that at once and informs the others.

Messages are lines of JSON: {"process", "count"} to process 0; then from it {"coordinator"} or {"error"}, and while the
world lasts {"lost"}; {"bye": true} from whoever leaves in good order.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from unidist.backends import door
from unidist.backends.lines import Line, is_loopback
from unidist.errors import BackendMismatchError, BackendNotAvailableError

_RETRY = 0.1
# Who stands in the queue unheard keeps nobody else out of it.
_QUEUE = 128


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
    """Waits until all `count` processes are at `address`, where process 0 listens.

    Raises:
        BackendNotAvailableError: some did not come in time, or process 0 cannot be reached or cannot listen there.
        BackendMismatchError: they disagree about their number, or two have the same index.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BackendNotAvailableError(f'the address of process 0 must be "host:port", found {address!r}')
    host = host.strip("[]")
    deadline = time.monotonic() + timeout
    if index == 0:
        return _as_first(host, int(port), count, deadline, timeout)
    return _as_other(host, int(port), count, index, deadline, timeout)


def _as_first(host: str, port: int, count: int, deadline: float, timeout: float) -> Roll:
    present: dict[int, Line] = {}
    with _listening(host, port, count) as server:
        try:
            _admit_all(server, present, count, deadline, timeout)
        except (BackendNotAvailableError, BackendMismatchError) as error:
            for line in present.values():
                line.say(error=str(error), mismatch=isinstance(error, BackendMismatchError))
                line.close()
            raise
        coordinator = f"{_bracketed(host)}:{_free_port(server)}"
    for line in present.values():
        line.say(coordinator=coordinator)
    return Roll(0, present, coordinator)


def _admit_all(server: socket.socket, present: dict[int, Line], count: int, deadline: float, timeout: float) -> None:
    with contextlib.closing(door.guests(server, deadline)) as guests:
        for line, hello, _ in guests:
            _admit(line, hello, present, count)
            if len(present) == count - 1:
                return
    missing = sorted(set(range(1, count)) - set(present))
    raise BackendNotAvailableError(
        f"processes {missing} of {count} did not come to process 0 within {timeout:g} s: check that all {count} "
        "were started, and that they can reach its host and port"
    )


def _admit(line: Line, hello: dict[str, Any], present: dict[int, Line], count: int) -> None:
    other = hello.get("process")
    if type(other) is not int or type(hello.get("count")) is not int:
        line.close()
        return
    if hello["count"] != count or not 0 < other < count or other in present:
        text = (
            f"process 0 waits for processes 1 to {count - 1}, once each, but one came as process {other} of "
            f"{hello['count']}: give every process the same count and its own index"
        )
        line.say(error=text, mismatch=True)
        line.close()
        raise BackendMismatchError(text)
    present[other] = line


def _as_other(host: str, port: int, count: int, index: int, deadline: float, timeout: float) -> Roll:
    line = Line(_connected(host, port, index, count, deadline, timeout))
    door.knock(line, process=index, count=count)
    # Process 0 gives up first, and says so.
    answer = line.hear(max(0.0, deadline - time.monotonic()) + 5.0)
    if answer is None or "coordinator" not in answer:
        line.close()
        text = "process 0 ended or did not answer" if answer is None else str(answer.get("error"))
        kind = BackendMismatchError if answer is not None and answer.get("mismatch") else BackendNotAvailableError
        raise kind(f"process {index} of {count} could not join at {host}:{port}: {text}")
    return Roll(index, {0: line}, str(answer["coordinator"]))


def _connected(host: str, port: int, index: int, count: int, deadline: float, timeout: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(0.01, left))
        except OSError as error:
            if left <= 0:
                raise BackendNotAvailableError(
                    f"process {index} of {count} could not reach process 0 at {host}:{port} within {timeout:g} s "
                    f"({error}): check that it was started, its address, and that no firewall is between"
                ) from error
        time.sleep(_RETRY)


def _listening(host: str, port: int, count: int) -> socket.socket:
    """A listener for the others: on the loopback alone where the address is that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        place = (host if is_loopback(host) else "", port)
        return socket.create_server(place, family=family, backlog=max(count, _QUEUE))
    except OSError as error:
        raise BackendNotAvailableError(
            f"process 0 cannot listen on port {port} for the others ({error}): choose an address whose port is free"
        ) from error


def _free_port(server: socket.socket) -> int:
    with socket.socket(server.family) as probe:
        probe.bind((server.getsockname()[0], 0))
        return int(probe.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
