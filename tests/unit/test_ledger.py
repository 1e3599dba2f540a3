"""The ledger: what the simulator's rank 0 sends is what plans predict; sums, purposes and the table of text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

import unidist
from unidist import Layout, Ledger, Mesh, events
from unidist.algebra import Sharding, redistribution
from unidist.backends import registry
from unidist.events import Event

MESH = Mesh({"data": 2, "model": 3})
VALUE = np.ones((6, 12), "float32")


@pytest.fixture(autouse=True)
def six_devices() -> Iterator[None]:
    with registry.isolated():
        registry.use("sim", devices=6)
        yield


def test_the_collectives_of_the_lowest_rank_are_recorded_in_order_with_their_bytes() -> None:
    x = unidist.distribute(VALUE, MESH, Layout("data", partial="model"))
    with unidist.ledger() as book, events.for_purpose("a test"):
        y = unidist.all_reduce(x)
        y = unidist.all_gather(y, "data")
        unidist.broadcast(y, None, 0)
        unidist.permute(y, "data", [(0, 1)])
        y.redistribute(Layout("data"))
        unidist.barrier()
    half, whole = 6 * 12 * 4 // 2, 6 * 12 * 4
    assert book.events == [
        Event("all_reduce", ("model",), (0, 1, 2), Fraction(2 * 2 * half, 3), "a test"),
        Event("all_gather", ("data",), (0, 3), Fraction(whole, 2), "a test"),
        Event("broadcast", ("data", "model"), (0, 1, 2, 3, 4, 5), Fraction(5 * whole, 6), "a test"),
        Event("permute", ("data",), (0, 3), Fraction(whole), "a test"),
    ]
    assert (book.count(), book.count("permute"), book.count(purpose="other")) == (4, 1, 0)
    assert book.bytes() == 192 + 144 + 240 + 288
    assert book.bytes("all_gather", purpose="a test") == 144


def test_gathering_is_recorded_and_predicted() -> None:
    src, dst = Sharding(MESH, Layout("data", "model"), (6, 12)), Sharding(MESH, Layout(), (6, 12))
    x = unidist.distribute(VALUE, MESH, src.layout)
    with unidist.ledger() as book:
        x.numpy()
    assert book.bytes() == redistribution(src, dst).bytes(4, 0) > 0


def test_nothing_is_recorded_outside_or_over_axes_of_size_one() -> None:
    x = unidist.distribute(VALUE, Mesh({"one": 1, "x": 6}), Layout("one"))
    with unidist.ledger() as book:
        unidist.all_gather(x, "one")
    unidist.distribute(VALUE, MESH, Layout("data")).numpy()
    assert book.events == []
    assert not events.listening()


def test_nested_ledgers_both_hear_and_the_outer_goes_on() -> None:
    x = unidist.distribute(VALUE, MESH, Layout("data"))
    with unidist.ledger() as outer:
        with unidist.ledger() as inner:
            x.numpy()
        x.numpy()
    assert (inner.count(), outer.count()) == (1, 2)
    seen: list[Event] = []
    with events.listen(seen.append):
        with events.listen(seen.append):
            x.numpy()
        x.numpy()
    assert len(seen) == 3


def test_threads_do_not_lose_events() -> None:
    with unidist.ledger() as book:
        event = Event("all_reduce", ("x",), (0, 1), Fraction(1), "")
        threads = [threading.Thread(target=lambda: [events.emit(event) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert book.count() == book.bytes() == 2000


def test_bytes_are_whole_numbers_where_they_are_and_exact() -> None:
    book = Ledger([Event("all_reduce", ("x",), (0, 1, 2), Fraction(1, 3), "") for _ in range(3)])
    assert book.bytes() == 1
    assert isinstance(book.bytes(), int)
    book.add(Event("permute", ("x",), (0, 1), Fraction(1, 2), "b"))
    assert book.bytes() == 1.5


def test_the_table_groups_by_collective_axes_and_purpose() -> None:
    gradient = Event("all_reduce", ("data", "model"), (0, 1), Fraction(1000), "gradient")
    book = Ledger([gradient, Event("all_gather", ("data",), (0, 1), Fraction(24), "forward"), gradient])
    assert book.rows() == [
        ("all_reduce", "data,model", "gradient", 2, 2000),
        ("all_gather", "data", "forward", 1, 24),
    ]
    assert book.show().splitlines() == [
        "collective  axes        for       count  bytes per rank",
        "all_reduce  data,model  gradient      2           2,000",
        "all_gather  data        forward       1              24",
        "total                                 3           2,024",
    ]
