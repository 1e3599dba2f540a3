"""Plans: the table of the design, one collective for several axes, and no way shorter than the planner's."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from unidist.algebra import Layout, Mesh, Sharding, Step, redistribution, ring_bytes
from unidist.errors import LayoutError
from unidist.testing import samples

MESH = Mesh({"data": 2, "model": 3})
BOTH = ("data", "model")


def steps(src: Layout, dst: Layout, shape: tuple[int, ...] = (36, 36), mesh: Mesh = MESH) -> list[tuple[str, ...]]:
    return [(step.op, *step.axes) for step in redistribution(Sharding(mesh, src, shape), Sharding(mesh, dst, shape))]


@pytest.mark.parametrize(
    ("src", "dst", "wanted"),
    [
        (Layout(), Layout(), []),
        (Layout(), Layout(fanout="data"), [("retype", "data")]),
        (Layout(partial="data"), Layout(), [("all_reduce", "data")]),
        (Layout(partial="data"), Layout(fanout="data"), [("all_reduce", "data")]),
        (Layout(partial="data"), Layout("data"), [("reduce_scatter", "data")]),
        (Layout("data"), Layout(), [("all_gather", "data")]),
        (Layout("data"), Layout(fanout="data"), [("all_gather", "data")]),
        (Layout("model"), Layout(None, "model"), [("all_to_all", "model")]),
        (Layout(), Layout("model"), [("slice", "model")]),
        (Layout("data"), Layout(partial="data"), [("embed", "data")]),
        (Layout(), Layout(partial="data"), [("mask", "data")]),
        (Layout(partial={"data": "mean"}), Layout(), [("scale", "data"), ("all_reduce", "data")]),
        (Layout(partial={"data": "max"}), Layout("data"), [("reduce_scatter", "data")]),
        (Layout("data"), Layout("data", "model"), [("slice", "model")]),
    ],
    ids=str,
)
def test_one_row_of_the_table_is_one_step(src: Layout, dst: Layout, wanted: list[tuple[str, ...]]) -> None:
    assert steps(src, dst) == wanted


@pytest.mark.parametrize(
    ("src", "dst", "op"),
    [
        (Layout(partial=BOTH), Layout(), "all_reduce"),
        (Layout(partial=BOTH), Layout(fanout=BOTH), "all_reduce"),
        (Layout(partial=BOTH), Layout(BOTH), "reduce_scatter"),
        (Layout(BOTH), Layout(), "all_gather"),
        (Layout(BOTH), Layout(fanout=BOTH), "all_gather"),
        (Layout(BOTH), Layout(None, BOTH), "all_to_all"),
        (Layout(("model", "data")), Layout(None, ("model", "data")), "all_to_all"),
        (Layout(partial=BOTH), Layout(("model", "data")), "reduce_scatter"),
        (Layout(partial={"data": "max", "model": "max"}), Layout(), "all_reduce"),
    ],
    ids=str,
)
def test_several_axes_that_move_alike_move_as_one_group(src: Layout, dst: Layout, op: str) -> None:
    for shape in [(36, 36), (5, 7)]:
        found = steps(src, dst, shape)
        assert [step[0] for step in found] == [op]
        assert set(found[0][1:]) == set(BOTH)


def test_the_strategies_of_the_design_send_what_it_says() -> None:
    n, size = 4, 1024
    mesh = Mesh({"data": n})

    def sent(src: Layout, dst: Layout) -> tuple[list[str], Fraction]:
        moves = redistribution(Sharding(mesh, src, (size,)), Sharding(mesh, dst, (size,)))
        return [step.op for step in moves], moves.bytes(4, 0)

    part = Fraction(size * 4 * (n - 1), n)
    partial, whole, fan, cut = Layout(partial="data"), Layout(), Layout(fanout="data"), Layout("data")
    assert sent(partial, whole) == (["all_reduce"], 2 * part)
    assert sent(partial, cut) == (["reduce_scatter"], part)
    assert sent(cut, whole) == (["all_gather"], part)
    assert sent(cut, fan) == (["all_gather"], part)
    assert sent(whole, fan) == (["retype"], 0)
    assert [step.op for step in redistribution(Sharding(mesh, cut, (8,)), Sharding(mesh, fan, (8,))).adjoint] == [
        "reduce_scatter"
    ]


def test_free_cuts_come_before_what_is_sent() -> None:
    assert steps(Layout(partial="data"), Layout("data", "model")) == [("slice", "model"), ("reduce_scatter", "data")]
    assert steps(Layout("data"), Layout(None, "data", fanout="model")) == [("retype", "model"), ("all_to_all", "data")]


def test_no_step_but_a_scaling_is_by_a_mean() -> None:
    """Adapters reduce by sum, max, min and prod alone: means are sums that are scaled."""
    states: list[dict[str, Any]] = [{}, {"fanout": "a"}, {"partial": {"a": "mean"}}, {"partial": {"a": "sum"}}]
    ways = [Layout(**state) for state in states] + [Layout("a"), Layout(None, "a"), Layout("b", partial={"a": "mean"})]
    ways += [Layout(partial={"a": "mean", "b": op}) for op in ("mean", "sum")]
    mesh = Mesh({"a": 2, "b": 2})
    for src, dst in itertools.product(ways, ways):
        moves = redistribution(Sharding(mesh, src, (8, 8)), Sharding(mesh, dst, (8, 8)))
        assert {step.reduce for step in (*moves, *moves.adjoint) if step.op != "scale"} <= {"sum"}


def test_of_ways_that_send_alike_the_one_is_taken_whose_gradient_sends_less() -> None:
    # The other way round the gradient would be summed over the model axis whole, not in parts.
    assert steps(Layout(), Layout("data", fanout="model")) == [("slice", "data"), ("retype", "model")]


def test_plans_are_cached_and_refuse_another_mesh_or_shape() -> None:
    src, dst = Sharding(MESH, Layout("data"), (4,)), Sharding(MESH, Layout(), (4,))
    assert redistribution(src, dst) is redistribution(src, dst)
    with pytest.raises(LayoutError, match="mesh and global shape must be the same"):
        redistribution(src, Sharding(MESH, Layout(), (5,)))
    with pytest.raises(LayoutError, match="mesh and global shape must be the same"):
        redistribution(src, Sharding(Mesh({"data": 2, "model": 3}, [5, 4, 3, 2, 1, 0]), Layout(), (4,)))


def test_a_reduction_that_is_not_linear_has_no_adjoint() -> None:
    moves = redistribution(Sharding(MESH, Layout(partial={"data": "max"}), (4,)), Sharding(MESH, Layout("data"), (4,)))
    with pytest.raises(LayoutError, match="partial by max"):
        _ = moves.adjoint
    with pytest.raises(LayoutError, match=r"reduce_scatter by max over \('data',\) is not linear"):
        _ = moves.steps[0].adjoint


def test_ring_bytes_are_the_closed_forms() -> None:
    assert ring_bytes("all_reduce", 4, 100) == 150
    assert ring_bytes("all_gather", 4, 100) == ring_bytes("reduce_scatter", 4, 100) == 75
    assert ring_bytes("broadcast", 4, 100) == 75
    assert ring_bytes("permute", 4, 100) == 100
    assert ring_bytes("all_reduce", 3, 100) == Fraction(400, 3)
    assert ring_bytes("permute", 1, 100) == 0


# Against every way there is ----------------------------------------------------------------------------------------


def ways_on(now: Sharding, dst: Layout) -> Iterator[Step]:
    """Every step of the table, for every group of axes, that does not cut, sum or mask an axis needlessly."""
    layout, dims = now.layout, range(len(now.shape))
    names = now.mesh.axis_names
    chosen = [c for n in range(1, len(names) + 1) for c in itertools.permutations(names, n)]
    for axes in chosen:
        states = {layout.state(a) for a in axes}
        wants = {dst.state(a) for a in axes}
        for dim in dims:
            if layout.dim_axes(dim)[-len(axes) :] == axes:
                for whole in ("I", "F"):
                    yield Step("all_gather", axes, now, now.with_layout(layout.with_axis(axes, whole)), dim)
                for to in set(dims) - {dim}:
                    yield Step("all_to_all", axes, now, now.with_layout(layout.with_axis(axes, "S", dim=to)), dim, to)
                if wants == {"P"}:
                    yield Step("embed", axes, now, now.with_layout(layout.with_axis(axes, "P")), dim)
            if wants == {"S"} and len(states) == 1 and states <= {"P", "I", "F"}:
                op = "reduce_scatter" if states == {"P"} else "slice"
                yield Step(op, axes, now, now.with_layout(layout.with_axis(axes, "S", dim=dim)), dim)
        if states == {"P"} and wants != {"P"}:
            for whole in ("I", "F"):
                yield Step("all_reduce", axes, now, now.with_layout(layout.with_axis(axes, whole)))
        if len(axes) == 1 and states < {"I", "F"}:
            for state in ("I", "F", "P") if wants == {"P"} else ("I", "F"):
                if {state} != states:
                    op = "mask" if state == "P" else "retype"
                    yield Step(op, axes, now, now.with_layout(layout.with_axis(axes, state)))


def least_bytes(src: Sharding, dst: Sharding) -> Fraction:
    best, queue, order = {src.layout: Fraction(0)}, [(Fraction(0), 0, src)], itertools.count(1)
    while queue:
        cost, _, now = heapq.heappop(queue)
        if now.layout == dst.layout:
            return cost
        for step in ways_on(now, dst.layout):
            reached = cost + step.bytes(1, 0)
            if reached < best.get(step.after.layout, reached + 1):
                best[step.after.layout] = reached
                heapq.heappush(queue, (reached, next(order), step.after))
    raise AssertionError(f"no way from {src} to {dst}")


@pytest.mark.parametrize("shape", [(36, 36), (36,)], ids=str)
def test_no_way_sends_less_than_the_plan(shape: tuple[int, ...]) -> None:
    kinds = [Sharding(MESH, layout, shape) for layout in samples.layouts(BOTH, len(shape))]
    for src, dst in itertools.product(kinds, repeat=2):
        assert redistribution(src, dst).bytes(1, 0) == least_bytes(src, dst), f"{src.layout} -> {dst.layout}"


def test_planning_is_quick_on_three_axes() -> None:
    mesh = Mesh({"a": 2, "b": 2, "c": 3})
    kinds = [Sharding(mesh, layout, (12, 24, 36)) for layout in samples.layouts(mesh.axis_names, 3)]
    found = [len(redistribution(src, dst)) for src, dst in zip(kinds, kinds[100:], strict=False)]
    assert max(found) <= 8
