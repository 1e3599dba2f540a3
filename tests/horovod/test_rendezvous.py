"""Horovod's rendezvous server: what it forgets once all have met."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from unidist.backends.horovod import rendezvous

LOOPBACK = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[str]:
    """The address of one for two processes, each a host of its own."""
    server = rendezvous.serve(LOOPBACK, 0, rendezvous.slots(2, 1))
    yield f"http://{LOOPBACK}:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(method: str, place: str, value: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(place, value, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def test_addresses_of_a_world_that_was_left_are_forgotten(server: str) -> None:
    """Process 0 is done with its own host before process 1 is done with the world."""
    for rank in range(2):
        ask("PUT", f"{server}/global/{rank}", b"127.0.0.1:9")
        ask("PUT", f"{server}/cross_0/{rank}", b"127.0.0.1:9")
    ask("DELETE", f"{server}/global/0")
    ask("PUT", f"{server}/local_host0/0", b"127.0.0.1:9")
    ask("DELETE", f"{server}/local_host0/0")
    assert ask("GET", f"{server}/global/0") == (200, b"127.0.0.1:9")
    assert ask("DELETE", f"{server}/global/1") == (200, b"")
    assert ask("GET", f"{server}/global/0") == ask("GET", f"{server}/global/1") == (404, b"")
    assert ask("GET", f"{server}/local_host0/0") == (404, b"")
    assert ask("GET", f"{server}/cross_0/1") == (200, b"127.0.0.1:9")


def test_the_next_world_meets_there(server: str) -> None:
    for port in (b"1", b"2"):
        for rank in range(2):
            ask("PUT", f"{server}/global/{rank}", port)
        assert ask("GET", f"{server}/global/0") == (200, port)
        for rank in range(2):
            ask("DELETE", f"{server}/global/{rank}")
        assert ask("GET", f"{server}/global/0") == (404, b"")


def test_scopes_that_processes_add_are_theirs(server: str) -> None:
    ask("PUT", f"{server}/set_1/0", b"x")
    assert ask("DELETE", f"{server}/set_1/0") == (200, b"")
    assert ask("GET", f"{server}/set_1/0") == (404, b"")
    assert ask("DELETE", f"{server}/nothing")[0] == 400
