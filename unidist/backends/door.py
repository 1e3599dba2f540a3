"""A listening socket through which only the processes of a world come in, whoever else knocks.

Who comes says so in one line of JSON. Where the launcher has handed out a token, that has it too. All others are sent
away without an answer: port scans, connections that say nothing, or too much, or no JSON, and processes of other jobs.
None of them keeps those waiting that belong here.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable, Generator
from typing import Any

from unidist.backends.lines import Line

TOKEN = "UNIDIST_TOKEN"
# Seconds and bytes that a newcomer has for its first line, and how many newcomers are waited for at a time.
_PATIENCE, _LONGEST, _MOST = 10.0, 4096, 512

Guest = tuple[Line, dict[str, Any], str]


def knock(line: Line, **words: Any) -> None:
    """Says the first line: these words, and the token."""
    line.say(**words, token=os.environ.get(TOKEN, ""))


def guests(
    server: socket.socket, deadline: float, is_closed: Callable[[], bool] = lambda: False
) -> Generator[Guest, None, None]:
    """Yields the guests that know the token, each with what else it said and its address.

    They come until the deadline, or until `is_closed`.
    """
    server.setblocking(False)
    newcomers: dict[socket.socket, tuple[Line, float, str]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while (now := time.monotonic()) < deadline and not is_closed():
                for key, _ in selector.select(min(deadline - now, 0.2)):
                    if key.fileobj is server:
                        _let_knock(server, selector, newcomers)
                        continue
                    connection: Any = key.fileobj
                    line, until, address = newcomers.pop(connection)
                    selector.unregister(connection)
                    heard = line.hear_now(_LONGEST)
                    if heard == {}:
                        newcomers[connection] = line, until, address
                        selector.register(connection, selectors.EVENT_READ)
                    elif heard is not None and _knows_the_token(heard):
                        connection.setblocking(True)
                        yield line, heard, address
                    else:
                        line.close()
                _send_away(selector, newcomers, time.monotonic())
        finally:
            for line, _, _ in newcomers.values():
                line.close()


def _let_knock(
    server: socket.socket,
    selector: selectors.BaseSelector,
    newcomers: dict[socket.socket, tuple[Line, float, str]],
) -> None:
    try:
        connection, address = server.accept()
        newcomers[connection] = Line(connection), time.monotonic() + _PATIENCE, str(address[0])
        selector.register(connection, selectors.EVENT_READ)
    except OSError:  # it has gone again, or there are no descriptors left for now
        time.sleep(0.01)


def _send_away(
    selector: selectors.BaseSelector, newcomers: dict[socket.socket, tuple[Line, float, str]], now: float
) -> None:
    for connection, (line, until, _) in list(newcomers.items()):
        if now > until or len(newcomers) > _MOST:
            del newcomers[connection]
            with contextlib.suppress(OSError, KeyError, ValueError):
                selector.unregister(connection)
            line.close()


def _knows_the_token(heard: dict[str, Any]) -> bool:
    said, asked = str(heard.pop("token", "")), os.environ.get(TOKEN, "")
    return hmac.compare_digest(said.encode(errors="replace"), asked.encode(errors="replace")) or not asked
