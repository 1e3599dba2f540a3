"""Strangers at the port where processes meet: none of them is let in, and none keeps the others waiting."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from unidist.backends import door, meeting
from unidist.backends.jax import roll
from unidist.backends.lines import Line
from unidist.errors import BackendMismatchError
from unidist.launch.request import LOOPBACK, free_port

T = TypeVar("T")
TOKEN = "a token of this job"
SAYS = {"process": 1, "count": 2, "port": 1}
FALSE = [
    SAYS,
    {**SAYS, "token": "guessed"},
    {**SAYS, "count": 3, "token": ""},
    {**SAYS, "token": "\ud800"},
    {**SAYS, "token": [TOKEN]},
]
LINES = [
    b"[" * 60_000 + b"\n",
    b"[" * 4_000 + b"\n",
    b"no JSON\n",
    b"\xff\xfe\n",
    b"[1, 2]\n",
    b"{}\n",
    b"12\n",
    b"\n",
    b"x" * 70_000,
    b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
    *[json.dumps(words).encode() + b"\n" for words in FALSE],
]


@contextlib.contextmanager
def strangers(port: int, lines: list[bytes]) -> Iterator[None]:
    """Those who say these lines, one who goes at once, and one who stays and says nothing; they come first."""
    with contextlib.ExitStack() as stack:
        for line in (*lines, b"", None):
            connection = stack.enter_context(_connected(port))
            if line is None:
                continue
            with contextlib.suppress(OSError):
                connection.sendall(line)
            if not line:
                connection.close()
        yield


def _connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((LOOPBACK, port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def beside(function: Callable[[], T]) -> Callable[[], T]:
    """Runs it in a thread; a call of the result waits for it."""
    found: list[T | Exception] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def finish() -> T:
        thread.join(20)
        assert found, "it still waits"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return finish


def called(index: int, port: int, count: int = 2) -> Callable[[], roll.Roll]:
    return beside(lambda: roll.call(f"{LOOPBACK}:{port}", count, index, 15.0))


def test_strangers_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_TOKEN", TOKEN)
    port = free_port()
    first = called(0, port)
    with strangers(port, LINES):
        begun = time.monotonic()
        second = called(1, port)
        rolls = first(), second()
        assert time.monotonic() - begun < 4.0
    assert rolls[0].coordinator == rolls[1].coordinator
    assert not rolls[0].lost | rolls[1].lost
    for one in rolls:
        one.close()


def test_each_hears_where_all_are() -> None:
    port = free_port()
    sides = [beside(lambda k=k: meeting.meet(f"{LOOPBACK}:{port}", 3, k, 15.0)) for k in (2, 0, 1)]
    found = [side() for side in sides]
    for _, lines in found:
        for line in lines.values():
            line.close()
    assert [sorted(lines) for _, lines in found] == [[0], [1, 2], [0]]
    places = [places for places, _ in found]
    assert places == [places[0]] * 3
    assert len({*places[0], f"{LOOPBACK}:{port}"}) == 4
    assert all(place.startswith(f"{LOOPBACK}:") for place in places[0])


def test_without_a_token_those_who_do_not_speak_as_we_do_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIDIST_TOKEN", raising=False)
    port = free_port()
    first = called(0, port)
    words = [{**SAYS, "process": "1"}, {**SAYS, "process": None}, {**SAYS, "count": "2"}, {**SAYS, "port": "1"}]
    with strangers(port, [*LINES[:10], *[json.dumps(said).encode() + b"\n" for said in words]]):
        second = called(1, port)
        for one in (first(), second()):
            one.close()


def test_a_rank_of_this_job_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_TOKEN", TOKEN)
    port = free_port()
    first = called(0, port)
    second = called(1, port, count=3)
    for one in (first, second):
        with pytest.raises(BackendMismatchError, match="process 1 of 3"):
            one()


def test_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PATIENCE", 0.1)
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        theirs.settimeout(5.0)
        guests = door.guests(server, time.monotonic() + 2.0)
        taking = threading.Thread(target=list, args=(guests,))
        taking.start()
        begun = time.monotonic()
        assert theirs.recv(1) == b""
        assert time.monotonic() - begun < 1.5
        taking.join()


def test_who_says_a_byte_now_and_then_gets_no_more_time() -> None:
    ended = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        line = Line(server.accept()[0])

        def drip() -> None:
            while not ended.wait(0.05):
                theirs.send(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            begun = time.monotonic()
            assert line.hear(0.4) is None
            assert time.monotonic() - begun < 2.0
        finally:
            ended.set()
            thread.join()
            line.close()
