"""Each kernel of a stack on the rows that it has a weight for: as all on all rows, whoever chooses them."""

from __future__ import annotations

import pytest

from tests.support.sampling import unless_all
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


FEW, ALL = "dispatch: each expert computes the rows that it has a weight for", "all experts compute all rows: "
GATES = {
    "all to one": FEW,
    "einsum": FEW,
    "looks": ALL + "what it gives is not multiplied by weights and summed",
    "learned zeros": ALL + "weights that are zero may have a gradient",
    "mixes": ALL + "its kernels do not compute one by one, or its rows do not",
    "draws": ALL + "it draws random numbers",
}


@pytest.mark.parametrize("how", unless_all(["einsum", "learned zeros", "mixes"], list(GATES)))
def test_what_is_not_proven_is_computed_of_all_rows(four: ProcessWorld, how: str) -> None:
    difference, said = four.call(RUN("gated"), how)[0]
    assert difference < 1e-5
    assert GATES[how] in said


HUB = [
    ("mixtral", {"data": 2, "expert": 2}, "block"),
    ("gpt-oss", {"data": 2, "model": 2}, "none"),
    ("qwen3-moe", {"expert": 2, "model": 2}, "none"),
]


@pytest.mark.parametrize(("name", "sizes", "remat"), unless_all(HUB[:1], HUB), ids=str)
def test_mixtures_of_keras_hub(four: ProcessWorld, name: str, sizes: dict[str, int], remat: str) -> None:
    """Also where blocks are computed again in backward."""
    said = four.call(RUN("of_hub"), name, sizes, remat)[0]
    assert len(said) >= 2
    assert all(FEW in text for text in said)
