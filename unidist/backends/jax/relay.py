"""The relay: this process's way to JAX's coordination service, which outlives the service.

JAX aborts a process when its connection to the service closes: where process 0, which keeps the service, is killed,
all others would end by SIGABRT before they could say why. So they connect to a relay of their own on the loopback. It
hands all bytes on, and stays silent when process 0 is gone: the process then raises what the roll has heard, and has
the time to. JAX itself notices the silence when its heartbeats have not been answered for as long as was asked for.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_LOOPBACK = "127.0.0.1"
_CHUNK = 65536
_NAP, _LONGEST_NAP = 0.02, 1.0


class Relay:
    """Listens for this process's own JAX.

    Args:
        host, port: of the service.
    """

    def __init__(self, host: str, port: int) -> None:
        self._service = host, port
        self._server = socket.create_server((_LOOPBACK, 0))
        self._holds = True
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._silent: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True, name="unidist-relay").start()

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    @property
    def address(self) -> str:
        """ "host:port" for JAX."""
        return f"{_LOOPBACK}:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._open.append(near)
                threading.Thread(target=self._serve, args=(near,), daemon=True, name="unidist-relay").start()

    def _serve(self, near: socket.socket) -> None:
        # Process 0 may not have started the service yet.
        nap = _NAP
        while (far := self._connected()) is None:
            if not self._holds:
                _shut(near)
                return
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        self._open.append(far)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._answer, args=(far, near), daemon=True, name="unidist-relay").start()
        _hand_on(near, far)
        _shut(far)

    def _connected(self) -> socket.socket | None:
        try:
            return socket.create_connection(self._service)
        except OSError:
            return None

    def _answer(self, far: socket.socket, near: socket.socket) -> None:
        _hand_on(far, near)
        self._gone(near)

    def _gone(self, near: socket.socket) -> None:
        with self._lock:
            if self._holds:
                self._silent.append(near)
            else:
                _shut(near)

    def let_go(self) -> None:
        """From now on connections that the service closes are closed here too, as where there is no relay."""
        with self._lock:
            self._holds = False
            for near in self._silent:
                _shut(near)

    def close(self) -> None:
        """Ends the relay, when JAX has left the service."""
        self.let_go()
        for end in (self._server, *self._open):
            _shut(end)
            end.close()


def _hand_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
