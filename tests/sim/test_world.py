"""VirtualWorld: virtual ranks take turns, meet, and get an error at once when they disagree."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unidist import events
from unidist.backends.desync import Call, ranks_text
from unidist.backends.sim.threads import Abort, current_rank
from unidist.backends.sim.world import VirtualWorld
from unidist.errors import CapabilityError, DesyncError, MeshError

FOUR = (0, 1, 2, 3)


def total(world: VirtualWorld, ranks: tuple[int, ...], value: int, tag: Any = "sum") -> int:
    return int(world.exchange(ranks, tag, value, lambda values: [sum(values)] * len(values)))


@pytest.fixture
def world() -> Iterator[VirtualWorld]:
    world = VirtualWorld(4)
    yield world
    # Whatever happened to it, it works.
    assert world.run(lambda rank: total(world, FOUR, rank)) == [6, 6, 6, 6]
    world.close()


def desync(world: VirtualWorld, fn: Callable[[int], Any], *words: str) -> DesyncError:
    """What run raises; its text has all the words."""
    with pytest.raises(DesyncError) as caught:
        world.run(fn)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in:\n{caught.value}"
    return caught.value


# Running -----------------------------------------------------------------------------------------------------------


def test_results_are_in_rank_order_and_ranks_get_their_elements(world: VirtualWorld) -> None:
    assert world.run(lambda rank, letter, n: (rank, letter, n), "abcd", [5, 6, 7, 8]) == [
        (0, "a", 5),
        (1, "b", 6),
        (2, "c", 7),
        (3, "d", 8),
    ]
    with pytest.raises(MeshError, match="4 ranks, found 3"):
        world.run(lambda rank, n: n, [1, 2, 3])


def test_a_rank_knows_itself_and_the_main_thread_is_none(world: VirtualWorld) -> None:
    assert current_rank() is None
    assert world.run(lambda rank: current_rank()) == [0, 1, 2, 3]
    assert current_rank() is None


def test_threads_stay_between_runs_and_end_with_the_world(world: VirtualWorld) -> None:
    first = world.run(lambda rank: threading.current_thread())
    assert world.run(lambda rank: threading.current_thread()) == first
    assert all(thread.daemon for thread in first)
    world.close()
    assert not any(thread.is_alive() for thread in first)
    assert world.run(lambda rank: threading.current_thread()) != first


def test_a_world_that_is_forgotten_ends_its_threads() -> None:
    world = VirtualWorld(3)
    threads = world.run(lambda rank: threading.current_thread())
    gone = weakref.ref(world)
    del world
    gc.collect()
    assert gone() is None
    # Python ends worlds like this one: a thread that lets go of tensors behind it would abort the process.
    assert not any(thread.is_alive() for thread in threads)


def test_the_interpreter_ends_with_an_open_world() -> None:
    code = """
import threading
from unidist.backends.sim.world import VirtualWorld
world = VirtualWorld(64)
world.run(lambda rank: world.exchange(tuple(range(64)), "x", rank, list))
print(threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("65\n", "")


def test_a_forked_child_has_a_world_of_its_own() -> None:
    """In a program of its own: what other tests import here may object to being forked."""
    code = """
import os, signal, warnings
from unidist.backends.sim.world import VirtualWorld
world = VirtualWorld(4)
def total():
    return world.run(lambda rank: world.exchange((0, 1, 2, 3), "sum", rank, lambda values: [sum(values)] * 4))
total()
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what is tested here
if not (child := os.fork()):
    signal.alarm(20)  # ends the child if its world should hang
    print("child", total(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], total())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("child [6, 6, 6, 6]\n0 [6, 6, 6, 6]\n", "")


def test_one_rank_runs_at_a_time_and_hands_over_in_turn(world: VirtualWorld) -> None:
    trace: list[int] = []
    inside = 0

    def fn(rank: int) -> None:
        nonlocal inside
        for _ in range(3):
            inside += 1
            trace.append(rank)
            time.sleep(0.001)  # lets any other thread in that should wait
            assert inside == 1
            inside -= 1
            total(world, FOUR, rank)

    world.run(fn)
    # The last to arrive goes on at once, then the others in the order in which they came.
    assert trace == [0, 1, 2, 3, 3, 0, 1, 2, 2, 3, 0, 1]


def test_two_runs_take_the_same_turns() -> None:
    groups = ([(0, 1, 2, 3), (4, 5, 6, 7)], [(k, k + 4) for k in range(4)], [tuple(range(8))])

    def trace() -> list[tuple[int, int, int]]:
        world = VirtualWorld(8)
        seen: list[tuple[int, int, int]] = []

        def fn(rank: int) -> None:
            dice = random.Random(1)
            for step in range(60):
                group = next(g for g in dice.choice(groups) if rank in g)
                seen.append((step, rank, total(world, group, rank)))

        world.run(fn)
        world.close()
        return seen

    first = trace()
    assert len(first) == 8 * 60
    assert trace() == first


def test_context_and_hooks_reach_the_ranks_and_do_not_come_back(world: VirtualWorld) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    local = threading.local()

    def capture() -> Callable[[int], contextlib.AbstractContextManager[None]]:
        state = local.state

        @contextlib.contextmanager
        def enter(rank: int) -> Iterator[None]:
            local.state = state
            yield
            del local.state

        return enter

    world.on_enter.append(capture)
    local.state = "entered"

    def fn(rank: int) -> tuple[str, str, str]:
        found = variable.get()
        variable.set(f"of rank {rank}")
        total(world, FOUR, rank)
        return found, variable.get(), local.state

    variable.set("main")
    for _ in range(2):
        assert world.run(fn) == [("main", f"of rank {rank}", "entered") for rank in FOUR]
    assert variable.get() == "main"
    world.on_enter.clear()
    assert world.run(lambda rank: hasattr(local, "state")) == [False] * 4


def test_a_world_in_a_rank_of_another(world: VirtualWorld) -> None:
    inner = VirtualWorld(2)

    def fn(rank: int) -> int:
        parts = inner.run(lambda r: total(inner, (0, 1), 10 * rank + r))
        assert current_rank() == rank
        return total(world, FOUR, parts[0])

    assert world.run(fn) == [1 + 21 + 41 + 61] * 4
    inner.close()


def test_refusals(world: VirtualWorld) -> None:
    with pytest.raises(MeshError, match="at least one rank, found 0"):
        VirtualWorld(0)
    with pytest.raises(CapabilityError, match="running already"):
        world.run(lambda rank: world.run(lambda r: r))
    with pytest.raises(CapabilityError, match="cannot be closed"):
        world.run(lambda rank: world.close())
    with pytest.raises(CapabilityError, match=r"sum was called in thread 'MainThread', which is no virtual rank"):
        total(world, FOUR, 1)
    with pytest.raises(CapabilityError, match="no virtual rank of this world"):
        world.run(lambda rank: total(VirtualWorld(4), FOUR, rank))
    with pytest.raises(MeshError, match=r"rank 0 called sum for the ranks \(1, 2\), and is none of them"):
        world.run(lambda rank: total(world, (1, 2), rank))
    for ranks in ((0, 0), (0, 4)):
        with pytest.raises(MeshError, match="no group of ranks of a world of 4"):
            world.run(lambda rank, ranks=ranks: total(world, ranks, rank))


# Meeting -----------------------------------------------------------------------------------------------------------


def test_values_are_combined_once_in_the_order_of_the_group(world: VirtualWorld) -> None:
    calls: list[list[int]] = []

    def combine(values: list[int]) -> list[str]:
        calls.append(list(values))
        return [f"{place}:{value}" for place, value in enumerate(values)]

    assert world.run(lambda rank: world.exchange((2, 0, 3, 1), "x", rank, combine)) == ["1:0", "3:1", "0:2", "2:3"]
    assert calls == [[2, 0, 3, 1]]


def test_groups_of_a_mesh_meet_apart_and_a_group_of_one_at_once(world: VirtualWorld) -> None:
    def fn(rank: int) -> tuple[int, int, int]:
        row, column = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        return total(world, row, rank), total(world, column, rank), total(world, (rank,), rank)

    assert world.run(fn) == [(1, 2, 0), (1, 4, 1), (5, 2, 2), (5, 4, 3)]


def test_what_combine_raises_every_rank_of_the_group_raises(world: VirtualWorld) -> None:
    def refuse(values: list[int]) -> list[int]:
        raise ValueError("cannot combine")

    def fn(rank: int) -> int:
        with pytest.raises(ValueError, match="cannot combine"):
            world.exchange(FOUR, "x", rank, refuse)
        return total(world, FOUR, rank)

    assert world.run(fn) == [6] * 4


# Failing -----------------------------------------------------------------------------------------------------------


def all_reduce(shape: tuple[int, ...] = (2, 3), dtype: str = "float32", op: str = "sum") -> Call:
    return Call("all_reduce", shape, dtype, (("op", op),), ("data",))


def test_a_rank_that_returns_early(world: VirtualWorld) -> None:
    def fn(rank: int) -> None:
        with events.for_purpose("dense/kernel"):
            if rank != 2:
                total(world, FOUR, rank, all_reduce())

    error = desync(
        world,
        fn,
        "ranks 0, 1, 3 wait in all_reduce(op=sum) of float32 (2, 3) over ('data',) in the group of ranks 0-3",
        "for 'dense/kernel' at test_world.py:",
        "rank 2 is missing",
        "rank 2 ended without it",
    )
    assert (error.ranks, error.collective, error.variable) == (FOUR, "all_reduce", "dense/kernel")


def rows_and_columns(world: VirtualWorld, rank: int, columns_first: tuple[int, ...]) -> None:
    row, column = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    with events.for_purpose("bias"):
        for group in (column, row) if rank in columns_first else (row, column):
            total(world, group, rank, "row" if group is row else "column")


def test_groups_of_a_2x2_mesh_that_wait_for_each_other_in_a_ring(world: VirtualWorld) -> None:
    error = desync(
        world,
        lambda rank: rows_and_columns(world, rank, columns_first=(1, 2)),
        "rank 0 waits in row in the group of ranks 0, 1 for 'bias' at test_world.py:",
        "where rank 1 is missing",
        "rank 1 waits in column in the group of ranks 1, 3",
        "where rank 3 is missing",
        "rank 2 waits in column in the group of ranks 0, 2",
        "where rank 0 is missing",
        "rank 3 waits in row in the group of ranks 2, 3",
        "where rank 2 is missing",
    )
    assert (error.ranks, error.collective, error.variable) == (FOUR, "row", "bias")


def test_groups_of_a_2x2_mesh_in_another_order_that_resolves(world: VirtualWorld) -> None:
    world.run(lambda rank: rows_and_columns(world, rank, columns_first=(3,)))


def test_a_missing_participant_of_one_group_only(world: VirtualWorld) -> None:
    def fn(rank: int) -> None:
        total(world, ((0, 1), (2, 3))[rank // 2], rank, "row")
        if rank != 3:
            total(world, ((0, 2), (1, 3))[rank % 2], rank, "column")

    error = desync(world, fn, "rank 1 waits in column in the group of ranks 1, 3", "rank 3 is missing", "0, 2, 3 ended")
    assert (error.ranks, error.collective, error.variable) == ((1, 3), "column", None)


MISMATCHES = {
    "collective": (Call("all_gather", (2, 3), "float32", (("dim", 0),), ("data",)), "kernel", "all_gather(dim=0)"),
    "shape": (all_reduce(shape=(2, 4)), "kernel", "float32 (2, 4)"),
    "dtype": (all_reduce(dtype="float64"), "kernel", "float64 (2, 3)"),
    "op": (all_reduce(op="max"), "kernel", "all_reduce(op=max)"),
    "variable": (all_reduce(), "bias", "for 'bias'"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_call_different_things(world: VirtualWorld, kind: str) -> None:
    other, purpose, words = MISMATCHES[kind]

    def fn(rank: int) -> None:
        with events.for_purpose(purpose if rank == 2 else "kernel"):
            total(world, FOUR, rank, other if rank == 2 else all_reduce())

    error = desync(
        world,
        fn,
        "the virtual ranks 0-3 disagree on a collective",
        "ranks 0, 1 call all_reduce(op=sum) of float32 (2, 3) over ('data',) in the group of ranks 0-3 for 'kernel'",
        "rank 2 calls ",
        words,
    )
    assert (error.ranks, error.collective, error.variable) == ((0, 1, 2), "all_reduce", "kernel")


def test_axes_are_told_but_not_compared(world: VirtualWorld) -> None:
    calls = [Call("barrier", axes=("one", "x") if rank else ("x",)) for rank in FOUR]
    assert world.run(lambda rank: total(world, FOUR, rank, calls[rank])) == [6] * 4


def test_a_rank_that_raises_is_raised_as_itself_with_a_note(world: VirtualWorld) -> None:
    ended: list[int] = []

    def fn(rank: int) -> None:
        try:
            with contextlib.suppress(Exception):  # does not stop the unwinding
                total(world, FOUR, rank) if rank != 2 else None
            if rank == 2:
                raise KeyError("lost")
            ended.append(-1)
        finally:
            ended.append(rank)

    with pytest.raises(KeyError, match="lost") as caught:
        world.run(fn)
    assert caught.value.__notes__ == ["rank 2 of 4"]
    assert ended == [2, 0, 1]  # rank 3 had not begun


def test_a_rank_may_end_the_program(world: VirtualWorld) -> None:
    with pytest.raises(SystemExit) as caught:
        world.run(lambda rank: sys.exit(7) if rank == 1 else total(world, FOUR, rank))
    assert caught.value.code == 7


def test_unwinding_passes_through_collectives_in_finally(world: VirtualWorld) -> None:
    aborted: list[int] = []

    def fn(rank: int) -> None:
        if rank == 3:
            raise ValueError("first")
        try:
            total(world, FOUR, rank)
        finally:
            try:
                total(world, FOUR, rank)
            except Abort:
                aborted.append(rank)

    with pytest.raises(ValueError, match="first"):
        world.run(fn)
    assert aborted == [0, 1, 2]


def test_what_led_to_a_collective_that_nobody_joins_is_told_too(world: VirtualWorld) -> None:
    def fn(rank: int) -> None:
        try:
            if rank == 1:
                raise ValueError("first")
        finally:
            if rank == 1:
                total(world, FOUR, rank, "clean up")

    error = desync(world, fn, "rank 1 waits in clean up", "ranks 0, 2, 3 ended")
    assert isinstance(error.__context__, ValueError)


def test_no_failure_outlives_its_run(world: VirtualWorld) -> None:
    class Big:
        pass

    kept: list[weakref.ref[Big]] = []

    def fn(rank: int) -> None:
        big = Big()
        kept.append(weakref.ref(big))
        if rank == 3:
            raise ValueError("no")
        world.exchange(FOUR, "x", big, lambda values: values)

    gc.collect()
    gc.disable()  # nothing may wait for it: what a failed step held must be free for the next
    try:
        for _ in range(2):
            with contextlib.suppress(ValueError):
                world.run(fn)
        assert [ref() for ref in kept] == [None] * 8
    finally:
        gc.enable()


# Ctrl-C ------------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_ctrl_c_unwinds_the_ranks(world: VirtualWorld) -> None:
    ended: list[int] = []

    def fn(rank: int) -> None:
        try:
            for step in range(1_000_000):
                if (rank, step) == (1, 5):
                    interrupt()
                total(world, FOUR, rank)
        finally:
            ended.append(rank)

    before = world.run(lambda rank: threading.current_thread())
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        world.run(fn)
    assert time.monotonic() - start < 20
    assert sorted(ended) == [0, 1, 2, 3]
    assert world.run(lambda rank: threading.current_thread()) == before


def test_a_second_ctrl_c_leaves_a_rank_that_does_not_stop(world: VirtualWorld) -> None:
    stuck, going_on, left = threading.Event(), threading.Event(), threading.Event()
    pressed = 0

    def on_signal(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed += 1
        if pressed <= 2:
            raise KeyboardInterrupt

    def fn(rank: int) -> None:
        if rank == 1:
            stuck.set()
            going_on.wait(60)
        total(world, FOUR, rank)

    def press() -> None:
        stuck.wait(60)
        while not left.wait(0.2):  # again and again, for Python may take two signals as one
            interrupt()

    before = world.run(lambda rank: threading.current_thread())
    handler = signal.signal(signal.SIGINT, on_signal)
    helper = threading.Thread(target=press)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            world.run(fn)
        left.set()
        helper.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert pressed >= 2
    assert not going_on.is_set()
    assert world.run(lambda rank: total(world, FOUR, rank)) == [6] * 4
    going_on.set()
    for thread in before:
        thread.join(20)
        assert not thread.is_alive()


# Many --------------------------------------------------------------------------------------------------------------


def seconds(world: VirtualWorld, collectives: int) -> float:
    everyone = tuple(range(world.size))

    def fn(rank: int) -> int:
        return sum(total(world, everyone, 1) for _ in range(collectives))

    start = time.perf_counter()
    assert world.run(fn) == [collectives * world.size] * world.size
    return time.perf_counter() - start


def test_64_ranks_do_100_collectives_in_a_second() -> None:
    world = VirtualWorld(64)
    world.run(lambda rank: None)
    # About 0.1 s on two idle cores; once in ten suffices, for other programs may run beside this one.
    assert any(seconds(world, 100) < 1 for _ in range(10))
    world.close()


def test_512_ranks_work() -> None:
    world = VirtualWorld(512)
    seconds(world, 3)
    with pytest.raises(DesyncError, match=r"ranks 0-299, 301-511 wait in sum .* where rank 300 is missing"):
        world.run(lambda rank: None if rank == 300 else total(world, tuple(range(512)), 1))
    seconds(world, 1)
    world.close()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 2, 5, 6, 7], "ranks 0, 2, 5-7"), ([3, 2, 1], "ranks 3, 2, 1")],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
