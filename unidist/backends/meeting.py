"""Processes find each other before a framework starts, which would end those that wait in vain.

Process 0 listens at the address. Messages are lines of JSON: {"process", "count", "port"} to process 0; then from it
{"places"} or {"error", "mismatch"}. The connections stay, for what the processes say to each other afterwards.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from unidist.backends import door
from unidist.backends.environment import join_address
from unidist.backends.lines import Line, family_of, free_port, is_loopback
from unidist.errors import BackendMismatchError, BackendNotAvailableError

_RETRY = 0.1
# Who stands in the queue unheard keeps nobody else out of it.
_QUEUE = 128
# Process 0 gives up first, and says so.
_LATER = 5.0

Lines = dict[int, Line]


def meet(address: str, count: int, index: int, timeout: float) -> tuple[list[str], Lines]:
    """Waits until all `count` processes are at `address`, where process 0 listens.

    Returns:
        "host:port" of each process, with a port that is free there; and the connections, process 0's to all others and
        theirs to process 0.

    Raises:
        BackendNotAvailableError: some did not come in time, or process 0 cannot be reached or cannot listen there.
        BackendMismatchError: they disagree about their number, or two have the same index.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BackendNotAvailableError(f'the address of process 0 must be "host:port", found {address!r}')
    place, deadline = (host.strip("[]"), int(port)), time.monotonic() + timeout
    if index == 0:
        return _as_first(place, count, deadline, timeout)
    return _as_other(place, count, index, deadline, timeout)


def _as_first(place: tuple[str, int], count: int, deadline: float, timeout: float) -> tuple[list[str], Lines]:
    lines: Lines = {}
    with _listening(place, count) as server:
        places = {0: join_address(place[0], str(free_port(server)))}
        try:
            _admit_all(server, lines, places, count, deadline, timeout)
        except (BackendNotAvailableError, BackendMismatchError) as error:
            for line in lines.values():
                line.say(error=str(error), mismatch=isinstance(error, BackendMismatchError))
                line.close()
            raise
    ordered = [places[index] for index in range(count)]
    for line in lines.values():
        line.say(places=ordered)
    return ordered, lines


def _admit_all(
    server: socket.socket, lines: Lines, places: dict[int, str], count: int, deadline: float, timeout: float
) -> None:
    with contextlib.closing(door.guests(server, deadline)) as guests:
        for line, hello, host in guests:
            _admit(line, hello, host, lines, places, count)
            if len(places) == count:
                return
    missing = sorted(set(range(count)) - set(places))
    raise BackendNotAvailableError(
        f"processes {missing} of {count} did not come to process 0 within {timeout:g} s: check that all {count} "
        "were started, and that they can reach its host and port"
    )


def _admit(line: Line, hello: dict[str, Any], host: str, lines: Lines, places: dict[int, str], count: int) -> None:
    other, port = hello.get("process"), hello.get("port")
    if type(other) is not int or type(hello.get("count")) is not int or type(port) is not int:
        line.close()
        return
    if hello["count"] != count or not 0 < other < count or other in places:
        text = (
            f"process 0 waits for processes 1 to {count - 1}, once each, but one came as process {other} of "
            f"{hello['count']}: give every process the same count and its own index"
        )
        line.say(error=text, mismatch=True)
        line.close()
        raise BackendMismatchError(text)
    lines[other], places[other] = line, join_address(host, str(port))


def _as_other(
    place: tuple[str, int], count: int, index: int, deadline: float, timeout: float
) -> tuple[list[str], Lines]:
    connection = _connected(place, index, count, deadline, timeout)
    line = Line(connection)
    door.knock(line, process=index, count=count, port=free_port(connection))
    answer = line.hear(max(0.0, deadline - time.monotonic()) + _LATER)
    if answer is None or "places" not in answer:
        line.close()
        text = "process 0 ended or did not answer" if answer is None else str(answer.get("error"))
        kind = BackendMismatchError if answer is not None and answer.get("mismatch") else BackendNotAvailableError
        raise kind(f"process {index} of {count} did not meet the others at {join_address(*map(str, place))}: {text}")
    return [str(each) for each in answer["places"]], {0: line}


def _connected(place: tuple[str, int], index: int, count: int, deadline: float, timeout: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(place, timeout=max(0.01, left))
        except OSError as error:
            if left <= 0:
                raise BackendNotAvailableError(
                    f"process {index} of {count} could not reach process 0 at {join_address(*map(str, place))} within "
                    f"{timeout:g} s ({error}): check that it was started, its address, and that no firewall is between"
                ) from error
        time.sleep(_RETRY)


def _listening(place: tuple[str, int], count: int) -> socket.socket:
    """A listener for the others: on the loopback alone where the address is that."""
    host, port = place
    try:
        bound = (host if is_loopback(host) else "", port)
        return socket.create_server(bound, family=family_of(place), backlog=max(count, _QUEUE))
    except OSError as error:
        raise BackendNotAvailableError(
            f"process 0 cannot listen on port {port} for the others ({error}): choose an address whose port is free"
        ) from error
