"""Lines of JSON over TCP, in which the processes of a world speak beside their collectives."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_LONGEST = 65536


def is_loopback(host: str) -> bool:
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")


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
        try:
            self._socket.settimeout(timeout)
            while b"\n" not in self._rest:
                more = self._socket.recv(4096)
                if not more or len(self._rest) > _LONGEST:
                    return None
                self._rest += more
            line, self._rest = self._rest.split(b"\n", 1)
            message = json.loads(line)
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
