"""Layout: canonical forms, states, duals and the texts of its errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.algebra import Layout, Mesh
from unidist.errors import LayoutError
from unidist.testing import samples

ALL = list(samples.layouts(("a", "b", "c"), 2))


def test_equal_meanings_are_equal_layouts() -> None:
    assert Layout("x", None, None) == Layout("x") == Layout(("x",)) == Layout(["x"], ())
    assert hash(Layout(None, partial=("b", "a"))) == hash(Layout(partial={"a": "sum", "b": "sum"}))
    assert Layout(fanout=("b", "a")) == Layout(fanout=("a", "b"))
    assert Layout(("a", "b")) != Layout(("b", "a"))
    assert Layout() == Layout(None)
    assert len(set(ALL)) == len(ALL)


def test_every_layout_is_what_its_repr_says() -> None:
    mixed = [Layout("a", partial={"b": "max"}), Layout(partial={"a": "mean", "b": "sum"}), Layout(("a", "b"), "c")]
    for layout in ALL + mixed:
        assert eval(repr(layout)) == layout


def test_tables_say_it_in_words() -> None:
    nested = Layout(("a", "b"), None, "c", partial={"d": "mean", "e": "sum", "f": "sum"})
    assert (
        nested.in_words
        == "split on dim 0 over a and b, on dim 2 over c, parts of a mean over d, parts of a sum over e and f"
    )
    assert (Layout().in_words, Layout(partial="a").in_words) == ("replicated", "parts of a sum over a")
    assert Layout(fanout=("a", "b")).in_words == "its gradient is parts of a sum over a and b"
    assert len({layout.in_words for layout in ALL}) == len(ALL)


@given(st.sampled_from(ALL))
def test_the_dual_changes_partial_and_fanout_and_is_its_own_inverse(layout: Layout) -> None:
    swapped = {"S": "S", "I": "I", "P": "F", "F": "P"}
    assert [layout.dual().state(a) for a in "abc"] == [swapped[layout.state(a)] for a in "abc"]
    assert layout.dual().dims == layout.dims
    assert layout.dual().dual() == layout


@given(st.sampled_from(ALL), st.permutations("abc"), st.integers(1, 3), st.sampled_from("SPIF"), st.integers(0, 1))
def test_with_axis_moves_only_its_axes(layout: Layout, order: list[str], count: int, state: Any, dim: int) -> None:
    axes = tuple(order[:count])
    moved = layout.with_axis(axes, state, dim=dim if state == "S" else None)
    assert all(moved.state(a) == state for a in axes)
    assert all(moved.state(a) == layout.state(a) for a in order[count:])
    if state == "S":
        assert moved.dim_axes(dim)[-count:] == axes
    for d in range(2):
        kept = [a for a in layout.dim_axes(d) if a not in axes]
        assert [a for a in moved.dim_axes(d) if a not in axes] == kept


def test_queries() -> None:
    layout = Layout("a", ("b", "c"), partial={"d": "max"}, fanout="e")
    assert layout.sharded_axes == ("a", "b", "c")
    assert (layout.dim_of("c"), layout.dim_of("d"), layout.dim_axes(5)) == (1, None, ())
    assert (layout.op_of("d"), layout.op_of("a"), layout.partial_axes) == ("max", None, ("d",))
    assert [layout.state(axis) for axis in "adez"] == ["S", "P", "F", "I"]


def bad(*dims: Any, **kind: Any) -> Any:
    return lambda: Layout(*dims, **kind)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (bad("x", "x"), "axis 'x' is used twice"),
        (bad("x", partial="x"), "axis 'x' is used twice"),
        (bad(partial="x", fanout="x"), "axis 'x' is used twice"),
        (bad(("x", "x")), "axis 'x' is used twice"),
        (bad(3), "an axis must be a name, found 3"),
        (bad(("x", 1)), "an axis must be a name, found 1"),
        (bad(partial={"x": "median"}), r"unknown reduce op 'median' for axis 'x': one of \('sum', 'mean'"),
        (bad(partial={"x": "sum", "y": "max"}), "an array is partial by one op"),
        (lambda: Layout(partial={"x": "max"}).dual(), "has no dual: axis 'x' is partial by max"),
        (lambda: Layout().with_axis(("x",), "S"), "needs a dim"),
        (lambda: Layout("z").check(Mesh({"x": 2})), r"names axis 'z', but the mesh has {'x': 2}"),
        (lambda: Layout(partial="z").check(Mesh({"x": 2})), "names axis 'z'"),
        (lambda: Layout(fanout="z").check(Mesh({"x": 2})), "names axis 'z'"),
        (lambda: Layout(None, "x").check(Mesh({"x": 2}), 1), "shards dim 1 of a tensor that has 1 dims"),
    ],
)
def test_errors_say_what_was_found(make: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()
