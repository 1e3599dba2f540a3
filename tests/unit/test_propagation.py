"""Layouts with sizes, moves between them and what they cost, the choice among a rule's options: no framework."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial

import pytest

from unidist.algebra import Layout, Mesh, Sharding, redistribution
from unidist.errors import LayoutError
from unidist.propagation.choosing import Operand, Option, choose
from unidist.propagation.layouts import (
    PARTIAL,
    WHOLE,
    Cut,
    States,
    check,
    chunked,
    conflict,
    dual,
    fraction,
    layout_of,
    local_shape,
    offset,
    whole_shape,
)
from unidist.propagation.moves import cost, moves
from unidist.propagation.rules.contractions import contraction, linear, matmul
from unidist.propagation.rules.dims import moved, ordered, reduction, without
from unidist.propagation.rules.elementwise import elementwise
from unidist.propagation.rules.views import view

ROWS = chunked(0, 5, 2)


def test_chunks_are_as_torch_cuts_them() -> None:
    assert [chunked(0, n, 3).sizes for n in (7, 6, 4, 2, 0)] == [(3, 3, 1), (2, 2, 2), (2, 2, 0), (1, 1, 0), (0, 0, 0)]


def test_local_and_whole_shapes_are_each_others_inverse() -> None:
    layout: States = (chunked(0, 5, 2), chunked(2, 3, 2))
    locals_ = [local_shape((5, 4, 3), layout, places) for places in itertools.product((0, 1), repeat=2)]
    assert locals_ == [(3, 4, 2), (3, 4, 1), (2, 4, 2), (2, 4, 1)]
    assert {whole_shape(local, layout) for local in locals_} == {(5, 4, 3)}
    assert [offset(Cut(0, (2, 0, 3)), place) for place in range(3)] == [0, 2, 2]


def test_the_gradient_of_a_whole_is_partial() -> None:
    assert dual((WHOLE, PARTIAL, ROWS)) == (PARTIAL, WHOLE, ROWS)


@pytest.mark.parametrize("places", [1, 2, 3, 5, 7, 8, 12])
def test_parts_of_one_add_up_without_rounding(places: int) -> None:
    parts = [fraction(place, places) for place in range(places)]
    assert sum(map(Fraction, parts)) == 1
    assert max(parts) <= 2 * min(parts)


def test_states_are_those_of_the_algebra() -> None:
    mesh = Mesh({"data": 2, "model": 2})
    rows, columns = chunked(0, 5, 2), chunked(1, 4, 2)
    for states, layout in (
        ((rows, WHOLE), Layout("data")),
        ((PARTIAL, columns), Layout(None, "model", partial="data")),
        ((WHOLE, PARTIAL), Layout(partial="model")),
        ((columns, rows), Layout("model", "data")),
    ):
        assert layout_of(states, mesh.axis_names) == layout
        fanned = [axis for axis, state in zip(mesh.axis_names, states, strict=True) if state == WHOLE]
        assert layout_of(states, mesh.axis_names, fanned=True).fanout == tuple(fanned)


@pytest.mark.parametrize(
    "states",
    [(Cut(0, (2, 2)),), (Cut(2, (3, 2)),), (Cut(0, (2, 2, 1)),), (ROWS, ROWS)],
    ids=["sum", "dim", "places", "axes"],
)
def test_states_that_do_not_fit_are_refused(states: States) -> None:
    with pytest.raises(LayoutError):
        check((5, 4), states, (2,))


def every_state(shape: tuple[int, ...], places: int) -> list[States]:
    return [WHOLE, PARTIAL, *(chunked(dim, n, places) for dim, n in enumerate(shape))]  # type: ignore[list-item]


def test_moves_lead_to_the_layout_and_never_cut_a_dim_twice() -> None:
    layouts = [x for x in itertools.product(every_state((4, 6), 2), repeat=2) if not conflict(x)]  # type: ignore[arg-type]
    for have, want in itertools.product(layouts, repeat=2):
        now = list(have)
        for move in moves(have, want):
            assert all(now[axis] == move.before for axis in move.axes)
            for axis in move.axes:
                now[axis] = move.after
            assert not conflict(now)
        assert tuple(now) == want


def test_a_layout_that_cuts_a_dim_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="two axes"):
        moves((WHOLE, WHOLE), (ROWS, ROWS))


def test_sums_over_several_axes_are_joined_at_once() -> None:
    (move,) = moves((PARTIAL, PARTIAL), (WHOLE, WHOLE))
    assert (move.op, move.axes) == ("all_reduce", (0, 1))


def test_a_cut_comes_before_what_makes_a_value_larger() -> None:
    columns = chunked(1, 4, 2)
    assert [move.op for move in moves((ROWS, WHOLE), (WHOLE, columns))] == ["slice", "all_gather"]


def test_costs_are_those_of_the_algebra() -> None:
    """Where parts are even and one axis moves, a plan of the algebra sends the same bytes."""
    mesh = Mesh({"data": 2})
    for have, want in itertools.permutations((chunked(0, 4, 2), chunked(1, 6, 2), PARTIAL, WHOLE), 2):
        if want == PARTIAL:
            continue
        src, dst = (Sharding(mesh, layout_of((one,), ("data",), fanned=True), (4, 6)) for one in (have, want))
        sent = sum((step.bytes(8, 0) for step in redistribution(src, dst).steps), Fraction(0))
        assert cost((4, 6), 8, (have,), (want,), (2,)) == sent


# The choice -------------------------------------------------------------------------------------------------------


def chosen(rule: object, *operands: tuple[tuple[int, ...], object]) -> tuple[object, object]:
    found = choose(rule, [Operand(shape, (state,), 4) for shape, state in operands], (2,))  # type: ignore[arg-type]
    assert found is not None
    return [want[0] for want in found.wants], found.out[0]


def test_what_is_whole_is_cut_where_it_meets_what_is_cut() -> None:
    assert chosen(elementwise, ((5, 4), ROWS), ((5, 4), WHOLE)) == ([ROWS, ROWS], ROWS)
    assert chosen(elementwise, ((5, 4), ROWS), ((4,), WHOLE)) == ([ROWS, WHOLE], ROWS)


def test_the_smaller_operand_moves() -> None:
    wide = chunked(1, 4, 2)
    assert chosen(elementwise, ((5, 4), ROWS), ((1, 4), chunked(1, 4, 2))) == ([ROWS, WHOLE], ROWS)
    assert chosen(elementwise, ((5, 1), ROWS), ((5, 4), wide))[1] == wide


def test_partial_sums_stay_where_an_operation_is_linear() -> None:
    add, mul = partial(elementwise, linear="sum"), partial(elementwise, linear="product")
    assert chosen(add, ((5, 4), PARTIAL), ((5, 4), WHOLE)) == ([PARTIAL, PARTIAL], PARTIAL)
    assert chosen(mul, ((5, 4), PARTIAL), ((5, 4), WHOLE)) == ([PARTIAL, WHOLE], PARTIAL)
    assert chosen(mul, ((5, 4), PARTIAL), ((5, 4), PARTIAL))[1] == PARTIAL
    assert chosen(elementwise, ((5, 4), PARTIAL), ((5, 4), WHOLE)) == ([WHOLE, WHOLE], WHOLE)
    # A part among zeros would be as large as the whole.
    assert chosen(add, ((5, 4), PARTIAL), ((5, 4), ROWS)) == ([ROWS, ROWS], ROWS)


def test_column_and_row_products() -> None:
    terms, out = matmul((5, 4), (4, 6))
    product = partial(contraction, terms=terms, out=out)
    columns, shared = chunked(1, 6, 2), chunked(0, 4, 2)
    assert chosen(product, ((5, 4), WHOLE), ((4, 6), columns)) == ([WHOLE, columns], columns)
    assert chosen(product, ((5, 4), chunked(1, 4, 2)), ((4, 6), shared))[1] == PARTIAL
    assert chosen(product, ((5, 4), WHOLE), ((4, 6), shared)) == ([chunked(1, 4, 2), shared], PARTIAL)


def test_a_bias_beside_a_partial_product_counts_once() -> None:
    terms, out, bias = linear(2, True)
    rule = partial(contraction, terms=terms, out=out, bias=bias)
    k = chunked(1, 4, 2)
    assert chosen(rule, ((5, 4), k), ((6, 4), k), ((6,), WHOLE)) == ([k, k, PARTIAL], PARTIAL)


def test_a_sum_over_a_cut_dim_is_partial_and_an_extreme_is_none() -> None:
    total = partial(reduction, dims=(0,), keepdim=False, linear=True)
    assert chosen(total, ((5, 4), ROWS)) == ([ROWS], PARTIAL)
    assert chosen(partial(total, linear=False), ((5, 4), ROWS)) == ([WHOLE], WHOLE)
    assert chosen(total, ((5, 4), chunked(1, 4, 2))) == ([chunked(1, 4, 2)], chunked(0, 4, 2))


def test_a_view_keeps_a_cut_where_parts_stay_blocks() -> None:
    assert chosen(partial(view, shape=(15, 4)), ((5, 3, 4), ROWS))[1] == Cut(0, (9, 6))
    assert chosen(partial(view, shape=(5, 12)), ((5, 3, 4), chunked(1, 3, 2)))[1] == Cut(1, (8, 4))
    assert chosen(partial(view, shape=(15, 4)), ((5, 3, 4), chunked(1, 3, 2)))[1] == WHOLE
    assert (
        chosen(partial(view, shape=(2, 3, 4)), ((6, 4), Cut(0, (4, 2))))[1] == WHOLE
    )  # 4 rows are no whole number of 3


def test_two_axes_do_not_cut_one_dim() -> None:
    rows = chunked(0, 4, 2)
    found = choose(elementwise, [Operand((4, 4), (rows, WHOLE), 4), Operand((4, 4), (WHOLE, rows), 4)], (2, 2))
    assert found is not None
    assert not conflict(found.out)


def test_equal_costs_take_the_first_option() -> None:
    options = [Option((WHOLE,), PARTIAL), Option((WHOLE,), WHOLE)]
    found = choose(lambda states, shapes: options, [Operand((4,), (PARTIAL,), 4)], (2,))
    assert found is not None
    assert found.out == (PARTIAL,)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_rank_without_rows_chooses_as_those_that_have_some(rows: int) -> None:
    """Without rows to send nothing costs anything, and the first option would be taken."""
    cut = chunked(1, 4, 2)
    options = [Option((WHOLE,), WHOLE), Option((cut,), cut)]
    decision = choose(lambda states, shapes: options, [Operand((rows, 4), (cut,), 4)], (2,))
    assert decision is not None
    assert decision.out == (cut,)


def test_in_place_the_first_operand_keeps_its_layout() -> None:
    operands = [Operand((5, 4), (WHOLE,), 4), Operand((5, 4), (ROWS,), 4)]
    found = choose(elementwise, operands, (2,), in_place=True)
    assert found is not None
    assert (found.wants, found.out) == (((WHOLE,), (WHOLE,)), (WHOLE,))
    assert choose(partial(view, shape=(20,)), [Operand((5, 4), (ROWS,), 4)], (2,), in_place=True) is None


def test_mappings_of_dims() -> None:
    assert ordered((2, 0, 1)) == (1, 2, 0)
    assert without(3, (1,)) == (0, None, 1)
    assert moved(3, (0, 1), (2, 0)) == (2, 0, 1)
