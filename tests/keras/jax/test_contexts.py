"""An axis of contexts with Keras on JAX: the memory that it leaves, and what stands beside sequences."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.comparing import same
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

RUN = "tests.keras.jax.contexts:{}".format
LENGTH = 128
FOUR, GRID = {"context": 4}, {"data": 2, "context": 2}


@pytest.fixture(scope="module")
def expected(one: ProcessWorld) -> Any:
    return cache(lambda program, *args: one.call(RUN(program), *args)[0])


@pytest.fixture(scope="module")
def measured(four: ProcessWorld) -> Any:
    """Of a step of so many rows on a mesh: what it holds and sends."""
    found = cache(lambda sizes, zero, rows: four.call(RUN("measured"), dict(sizes), zero, rows)[0])
    return lambda sizes, zero, rows: found(tuple(sizes.items()), zero, rows)


@pytest.fixture(scope="module")
def whole(measured: Any) -> Any:
    """Bytes of a step of so many rows where each device holds all of each sequence."""
    return lambda rows: measured({"model": 4}, 0, rows)["temporary"]


@pytest.mark.parametrize(("sizes", "zero", "parts"), [(FOUR, 0, 4), ({"context": 2, "model": 2}, 0, 2), (GRID, 1, 4)])
def test_a_device_holds_a_part(sizes: dict[str, int], zero: int, parts: int, measured: Any, whole: Any) -> None:
    """At most 1.2 / n of what one device holds: some keys and values are gathered."""
    found = measured(sizes, zero, 4)
    assert found["temporary"] <= 1.2 / parts * whole(4)
    n = sizes["context"]
    assert found["tokens"] == (4 // sizes.get("data", 1), LENGTH // n)
    sent = found["sent"]
    assert sent["all_reduce", ("context",)] >= 2 * (n - 1) / n * found["weights"], "sums of weights' gradients"
    assert any(op == "all_gather" for op, _ in sent), "keys and values"
    if zero:
        assert sent["reduce_scatter", ("data",)] >= found["weights"] / 2


@pytest.mark.parametrize("zero", unless_all([3], [0, 3]))
def test_places_stay_cut_where_rows_do_not_divide(zero: int, measured: Any, whole: Any) -> None:
    found = measured(GRID, zero, 3)
    assert found["temporary"] <= 1.2 / 2 * whole(3)


def test_a_plan_counts_parts(four: ProcessWorld, measured: Any) -> None:
    """The sums of gradients, which the compiler sends too, and activations. What attention reads is left out."""
    one, found = (four.call(RUN("planned"), sizes)[0] for sizes in ({"model": 4}, FOUR))
    seen = measured(FOUR, 0, 4)
    assert found["estimated"].endswith(
        "to a compiler what is sent, and what attention reads of other devices' places is not in it"
    )
    assert found["sent"] == {("all_reduce", ("context",)): 2 * 3 * seen["weights"] // 4}
    assert found["sent"]["all_reduce", ("context",)] <= seen["sent"]["all_reduce", ("context",)]
    assert found["activations"] == one["activations"] / 4


@pytest.mark.parametrize("eagerly", [False, True])
def test_masks_of_what_a_model_is_given_stay(eagerly: bool, four: ProcessWorld, expected: Any) -> None:
    same(four.call(RUN("masked"), FOUR, eagerly)[0], expected("masked", None, False))


def test_what_is_no_sequence_stays_whole(four: ProcessWorld, expected: Any) -> None:
    same(four.call(RUN("beside"), GRID)[0], expected("beside", None))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [("pooled", FOUR), ("padded", FOUR), ("convolved", {"context": 2, "model": 2})],
    ids=["pooled", "padded", "convolved"],
)
def test_windows_over_places_that_are_cut(case: str, sizes: dict[str, int], four: ProcessWorld, expected: Any) -> None:
    found = four.call(RUN("windowed"), case, sizes)[0]
    same(found, expected("windowed", case, None))
    assert bool(found["sharded"]) == (case == "convolved")


def test_a_loop_by_hand(four: ProcessWorld, expected: Any) -> None:
    found = four.call(RUN("by_hand"), FOUR)[0]
    same(found, expected("by_hand", None))
    assert found["gathers"]


def test_a_model_generates(four: ProcessWorld, expected: Any) -> None:
    np.testing.assert_array_equal(four.call(RUN("written"), FOUR)[0], expected("written", None))
