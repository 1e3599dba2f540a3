"""Lines of JSON over TCP, in which the processes of a world speak beside their collectives."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

_LONGEST = 65536


def is_loopback(host: str) -> bool:
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")


def family_of(place: tuple[str, int]) -> socket.AddressFamily:
    """The kind of address that a (host, port) has. Raises OSError: the host leads nowhere."""
    return socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]


def own_address(host: str) -> str:
    """This machine's address, from which a host is reached. Raises OSError: there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def free_port(beside: socket.socket) -> int:
    """Returns a port that is free at the address of a socket of this process."""
    with socket.socket(beside.family) as probe:
        probe.bind((beside.getsockname()[0], 0))
        return int(probe.getsockname()[1])


class Line:
    """A connection that speaks in lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        # Small messages go at once.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, **message: Any) -> None:
        """Sends; a connection whose other end is gone is noticed by who reads it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, timeout: float | None) -> dict[str, Any] | None:
        """The next message; None where the other end has closed, is silent for too long or speaks otherwise."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while b"\n" not in self._rest:
                # In all: who sends a byte now and then gets no more time.
                self._socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
                if not self._has_more(_LONGEST):
                    return None
        except OSError:
            return None
        return self._next()

    def hear_now(self, longest: int) -> dict[str, Any] | None:
        """Reads as `hear` does, but gives {} where the message is not whole yet.

        None too where it is longer than so many bytes.
        """
        self._socket.settimeout(0.0)
        try:
            more = self._has_more(longest)
        except BlockingIOError:
            return {}
        except OSError:
            return None
        return None if not more else self._next() if b"\n" in self._rest else {}

    def _has_more(self, longest: int) -> bool:
        more = self._socket.recv(4096)
        self._rest += more
        return bool(more) and (b"\n" in self._rest[:longest] or len(self._rest) <= longest)

    def _next(self) -> dict[str, Any] | None:
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        # An empty one says nothing that anybody waits for.
        return message if isinstance(message, dict) and message else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
