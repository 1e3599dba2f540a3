"""Ranks that disagree on torch, in real processes: a DesyncError on all of them, soon."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unidist
from tests import preloaded
from tests.launch.runs import wait_until
from tests.support import flights
from tests.support.overlapping import found_by
from unidist.algebra import Group, Mesh
from unidist.backends.torch.backend import TorchBackend
from unidist.backends.torch.exchange import SMALL
from unidist.errors import CapabilityError, DesyncError, ProcessLostError
from unidist.testing.processes import Outcome, ProcessWorld

SOON = 15.0  # seconds, of a timeout of 60
LARGE = SMALL  # elements: more bytes than go by direct messages


def join() -> None:
    unidist.use("torch")
    unidist.initialize(timeout=60)


def backend() -> TorchBackend:
    return unidist.backend()  # type: ignore[return-value]


def group_of(ranks: list[int]) -> Group:
    return Mesh({"x": -1}, ranks).group("x", backend().rank)


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


Call = Callable[[Any, Group], Any]

# What rank 0 calls, what the others call, and words of the error.
APART: dict[str, tuple[Call, Call, list[str]]] = {
    "shapes": (
        lambda c, g: c.all_reduce(ones(3), g, "sum"),
        lambda c, g: c.all_reduce(ones(4), g, "sum"),
        ["all_reduce(op=sum) of float32 (3,)", "all_reduce(op=sum) of float32 (4,)"],
    ),
    "large shapes": (
        lambda c, g: c.all_reduce(ones(LARGE), g, "sum"),
        lambda c, g: c.all_reduce(ones(LARGE + 1), g, "sum"),
        [f"({LARGE},)", f"({LARGE + 1},)"],
    ),
    "dtypes": (
        lambda c, g: c.all_reduce(ones(3), g, "sum"),
        lambda c, g: c.all_reduce(ones(3, torch.int32), g, "sum"),
        ["of float32 (3,)", "of int32 (3,)"],
    ),
    "reductions": (
        lambda c, g: c.all_reduce(ones(LARGE), g, "sum"),
        lambda c, g: c.all_reduce(ones(LARGE), g, "prod"),
        ["op=sum", "op=prod"],
    ),
    "roots": (lambda c, g: c.broadcast(ones(3), g, 0), lambda c, g: c.broadcast(ones(3), g, 1), ["root=0", "root=1"]),
    "collectives": (
        lambda c, g: c.all_gather(ones(2), g, 0, (2,) * g.size),
        lambda c, g: c.reduce_scatter(ones(2 * g.size), g, 0, (2,) * g.size, "sum"),
        ["all_gather(", "reduce_scatter("],
    ),
    "a collective and a barrier": (
        lambda c, g: c.barrier(g),
        lambda c, g: c.all_reduce(ones(2), g, "sum"),
        ["barrier()", "all_reduce("],
    ),
    "buffers": (
        lambda c, g: c.all_reduce_inplace(ones(5), g, "sum").wait(),
        lambda c, g: c.all_reduce_inplace(ones(7), g, "sum").wait(),
        ["inplace=True) of float32 (5,)", "inplace=True) of float32 (7,)"],
    ),
    "parts": (
        lambda c, g: c.all_gather_into(ones(2 * g.size), ones(2), g).wait(),
        lambda c, g: c.all_gather_into(ones(3 * g.size), ones(3), g).wait(),
        ["of float32 (2,)", "of float32 (3,)"],
    ),
}


def disagree(name: str, rounds: int) -> tuple[float, str, tuple[int, ...], str | None]:
    """Some rounds in step, then rank 0 calls something else."""
    group, comm = group_of(list(range(backend().process_count()))), backend().comm
    for _ in range(rounds):
        assert comm.all_reduce(ones(3), group, "sum")[0] == group.size
        assert comm.all_reduce(ones(LARGE), group, "sum")[0] == group.size
    begin = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        APART[name][0 if backend().rank == 0 else 1](comm, group)
    assert flights.how(flights.here().entries[-1]) == "failed"
    return time.monotonic() - begin, str(caught.value), caught.value.ranks, caught.value.collective


def cross() -> tuple[float, str, tuple[int, ...]]:
    """Ranks 0 and 1 wait for each other in different groups; 2 and 3 for them."""
    rank, comm = backend().rank, backend().comm
    rows, all_of_them = group_of([0, 1] if rank < 2 else [2, 3]), group_of([0, 1, 2, 3])
    comm.all_reduce(ones(1), rows, "sum")
    comm.all_reduce(ones(1), all_of_them, "sum")
    begin = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        comm.all_reduce(ones(1), rows if rank == 0 else all_of_them, "sum")
    return time.monotonic() - begin, str(caught.value), caught.value.ranks


def new_groups() -> tuple[float, str, tuple[int, ...]]:
    """Groups that nobody has used before: each waits for the next one."""
    mesh, rank = Mesh({"a": 2, "b": 2}), backend().rank
    begin = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        backend().comm.all_reduce(ones(1), mesh.group("a" if rank in (0, 3) else "b", rank), "sum")
    return time.monotonic() - begin, str(caught.value), caught.value.ranks


def lose_one(folder: str) -> tuple[float, str]:
    """Rank 3 ends; rank 0 is in no group with it, and waits for rank 1, which is. All stay until each has heard."""
    mesh, rank, comm = Mesh({"a": 2, "b": 2}), backend().rank, backend().comm
    for axis in ("a", "b"):
        comm.all_reduce(ones(1), mesh.group(axis, rank), "sum")
    if rank == 3:
        time.sleep(1)
        os._exit(7)
    begin = time.monotonic()
    with pytest.raises(ProcessLostError) as caught:
        # Ranks 1 and 2 meet the lost one; rank 0 waits for rank 2.
        comm.all_reduce(ones(1), mesh.group("b" if rank == 2 else "a", rank), "sum")
    seconds = time.monotonic() - begin
    (Path(folder) / str(rank)).touch()
    wait_until(lambda: len(list(Path(folder).iterdir())) == 3, "three ranks to hear of it")
    return seconds, str(caught.value)


def wait_for_a_slow_one() -> float:
    """Rank 0 comes late, to a collective and to a group that is to be made; the others wait for it."""
    mesh, rank, comm = Mesh({"a": 2, "b": 2}), backend().rank, backend().comm
    total = 0.0
    for axis in ("a", "b", "a"):
        if rank == 0:
            time.sleep(2)
        total += comm.all_reduce(ones(1), mesh.group(axis, rank), "sum").item()
        total += comm.all_reduce(ones(1), mesh.group(("a", "b"), rank), "sum").item()
    return total


def compare_all() -> str:
    """Calls that both ranks have made before, in another order: only UNIDIST_CHECK=all compares those."""
    group, comm = group_of([0, 1]), backend().comm
    for _ in range(5):
        comm.all_reduce(ones(LARGE), group, "sum")
        comm.all_reduce(ones(LARGE), group, "prod")
    with pytest.raises(DesyncError) as caught:
        comm.all_reduce(ones(LARGE), group, "sum" if backend().rank else "prod")
    return str(caught.value)


# Each in a world of its own, which waits for most of its time ---------------------------------------------------------


def in_world(count: int, program: Callable[..., Any], *args: Any, check: str | None = None) -> dict[int, Outcome]:
    with ProcessWorld(count, setup=join, preload=preloaded.TORCH, env={"UNIDIST_CHECK": check}) as world:
        return world.outcomes(program, *args)


def in_world_that_loses_one() -> dict[int, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        return in_world(4, lose_one, folder)


def values(outcomes: dict[int, Outcome]) -> list[Any]:
    for outcome in outcomes.values():
        if outcome.failure is not None:
            raise outcome.failure
    return [outcomes[rank].value for rank in sorted(outcomes)]


WORLDS: dict[str, Callable[[], dict[int, Outcome]]] = {
    **{
        f"test_ranks_that_call_something_else_are_told[{name}]": partial(
            in_world, 3 if name in ("large shapes", "roots") else 2, disagree, name, 3 if name == "shapes" else 0
        )
        for name in APART
    },
    **{
        f"test_ranks_that_wait_in_different_groups_are_told[{program.__name__}]": partial(in_world, 4, program)
        for program in (cross, new_groups)
    },
    "test_a_loss_reaches_ranks_that_share_no_group_with_it": in_world_that_loses_one,
    "test_who_comes_late_is_waited_for": partial(in_world, 4, wait_for_a_slow_one),
    "test_all_calls_are_compared_where_that_is_asked_for": partial(in_world, 2, compare_all, check="all"),
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Callable[[str], dict[int, Outcome]]:
    return found_by(request, WORLDS)


@pytest.fixture
def outcomes(request: pytest.FixtureRequest, results: Callable[[str], dict[int, Outcome]]) -> dict[int, Outcome]:
    """What the processes of the test's own world came to."""
    return results(request.node.name)


@pytest.mark.parametrize("name", APART)
def test_ranks_that_call_something_else_are_told(name: str, outcomes: dict[int, Outcome]) -> None:
    for seconds, text, ranks, collective in values(outcomes):
        assert seconds < SOON
        assert all(words in text for words in APART[name][2])
        assert "test_desync.py:" in text
        # Of those that agree, the ones that have waited for long enough are named.
        assert 0 in ranks
        assert len(ranks) > 1
        assert collective is not None
        assert collective in APART[name][2][0] + text


@pytest.mark.parametrize("name", ["cross", "new_groups"])
def test_ranks_that_wait_in_different_groups_are_told(name: str, outcomes: dict[int, Outcome]) -> None:
    for seconds, text, ranks in values(outcomes):
        assert seconds < 2 * SOON
        assert "stuck" in text
        assert {0, 1} <= set(ranks)
        assert "missing" in text


def test_a_loss_reaches_ranks_that_share_no_group_with_it(outcomes: dict[int, Outcome]) -> None:
    for rank in range(3):
        assert outcomes[rank].failure is None, outcomes[rank].failure
        seconds, text = outcomes[rank].value
        assert seconds < SOON
        assert "start all processes again" in text


def test_who_comes_late_is_waited_for(outcomes: dict[int, Outcome]) -> None:
    assert values(outcomes) == [18.0] * 4


def test_all_calls_are_compared_where_that_is_asked_for(outcomes: dict[int, Outcome]) -> None:
    assert all("op=sum" in text and "op=prod" in text for text in values(outcomes))


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidist.backends.torch.calls import Calls

    monkeypatch.setenv("UNIDIST_CHECK", "some")
    with pytest.raises(CapabilityError, match="found 'some'"):
        Calls()
