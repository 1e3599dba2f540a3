"""Each kernel of a stack on the rows that it has a weight for: as all on all rows, whoever chooses them."""

from __future__ import annotations

import pytest

from unidist.testing.processes import ProcessWorld

RUN = "tests.keras.jax.experts:{}".format
PLACES = {
    "one device": ({}, (), ()),
    "apart": ({"data": 2, "model": 2}, ("model",), ("data",)),
    "over rows": ({"data": 2, "expert": 2}, ("expert",), ("data", "expert")),
    "both": ({"expert": 2, "model": 2}, ("expert", "model"), ("expert",)),
}


@pytest.mark.parametrize(
    ("places", "routing"),
    [("one device", "some"), ("apart", "some"), ("over rows", "some"), ("both", "some"), ("over rows", "all to one")],
)
def test_few_rows_are_summed_as_all_are(four: ProcessWorld, places: str, routing: str) -> None:
    assert four.call(RUN("compared"), *PLACES[places], routing)[0] < 1e-5


def test_no_row_may_be_chosen(four: ProcessWorld) -> None:
    assert four.call(RUN("compared"), *PLACES["one device"], "none")[0] == 0


def test_rows_are_gathered_and_sums_scattered_where_axes_cut_both(four: ProcessWorld) -> None:
    assert four.call(RUN("sent"))[0] == {"all_gather": 2, "reduce_scatter": 1}


STILL = ["top two", "contracted", "relu", "where"]
OTHERS = ["scores of the best", "chances beside scores", "half", "differences", "leaky"]


def test_zeros_without_a_gradient_are_known(four: ProcessWorld) -> None:
    assert [name for name in (*STILL, *OTHERS) if four.call(RUN("known"), name)[0][0]] == STILL
