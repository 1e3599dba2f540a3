"""States, gradients and values spread over the data ranks (ZeRO 1 to 3): one device's numbers, a part of its bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.comparing import same
from unidist.testing.processes import ProcessWorld

RUN = "tests.keras.jax.zero:{}".format
SHARDS = {"dp": 4, "2x2": 2, "2x2 across": 2}
SLOTS = {"adam": 2, "momentum": 1}
CASES = [
    ("mlp", "dp", 1, "adam"),
    ("mlp", "dp", 2, "adam"),
    ("mlp", "2x2", 3, "adam"),
    ("conv", "2x2", 1, "adam"),
    ("lstm", "dp", 3, "momentum"),
    ("subclassed", "dp", 1, "adam"),
]


@pytest.fixture(scope="module")
def expected(one: ProcessWorld) -> Any:
    return cache(lambda program, *args: one.call(RUN(program), *args)[0])


def spread(found: dict[str, Any], kind: str, zero: int, optimizer: str) -> None:
    """Each device holds its part of the slots, and at stage 3 of the values, and no more than a twentieth besides."""
    ideal = found["ruled"] / SHARDS[kind]
    assert ideal * SLOTS[optimizer] <= found["states"] <= 1.05 * ideal * SLOTS[optimizer]
    if zero == 3:
        assert ideal <= found["values"] <= 1.05 * ideal
    else:
        assert found["values"] == found["ruled"]
    assert found["others whole"]


@pytest.mark.parametrize(("name", "kind", "zero", "optimizer"), CASES)
def test_four_devices_train_as_one(
    four: ProcessWorld, expected: Any, name: str, kind: str, zero: int, optimizer: str
) -> None:
    found = four.call(RUN("train"), name, kind, zero, optimizer)[0]
    same(found, expected("train", name, None, 0, optimizer))
    spread(found, kind, zero, optimizer)
    assert found["described slots"] == found["slot count"]
    # What is updated in parts is gathered: after the update, or before the next use.
    assert found["sent"]["all_gather"] > 0
    assert found["sent"]["all_reduce"] + found["sent"]["reduce_scatter"] > 0


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_sent_is_the_closed_form(four: ProcessWorld, expected: Any, zero: int) -> None:
    """A reduce_scatter and an all_gather a variable and step: 2 (n-1)/n P. At stage 3 the program asks for the values
    again in backward, 3 (n-1)/n P; XLA's pipeline for CPUs keeps the first ones instead."""
    found = four.call(RUN("sent"), "dp", zero)[0]
    same(found, expected("sent", None, 0))
    steps, weights = 3, found["weights' bytes"]
    wanted = (steps * len(weights), steps * sum(weights) * 3 / 4)
    assert found["sent"]["reduce_scatter"] == wanted
    assert found["sent"]["all_gather"] == wanted
    # The loss, its denominators and what fit shows of them.
    assert found["sent"]["all_reduce"][1] <= steps * 4 * 8
    # Not for the biases, nor for the kernel behind which there is nothing to learn.
    assert found["gathers asked for"] == (0 if zero < 3 else len(weights) + 5)


def test_on_two_axes_gradients_are_scattered_over_the_data(four: ProcessWorld, expected: Any) -> None:
    for zero in (1, 3):
        found = four.call(RUN("sent"), "2x2", zero)[0]
        same(found, expected("sent", None, 0))
        count, size = found["sent"]["reduce_scatter"]
        assert count == 3 * len(found["weights' bytes"])
        assert size >= 3 * sum(found["weights' bytes"]) / 2 / 2
        # A bias that both axes cut is scattered to where its parts are: none is sent on.
        assert set(found["sent"]) == {"all_gather", "all_reduce", "reduce_scatter"}


def test_a_layer_that_mixes_rows_is_left_to_the_compiler(four: ProcessWorld, expected: Any) -> None:
    found = four.call(RUN("sent"), "dp", 3, False)[0]
    same(found, expected("sent", None, 0, False))
    assert found["sent"]["reduce_scatter"][0] == 3 * (len(found["weights' bytes"]) - 1)


@pytest.mark.processes
def test_two_processes_of_two_devices_train_as_one(pair: ProcessWorld, expected: Any) -> None:
    for found in pair.call(RUN("train"), "mlp", "2x2 across", 3):
        same(found, expected("train", "mlp", None, 0, "adam"))
        spread(found, "2x2 across", 3, "adam")


def test_a_built_optimizer_is_laid_anew(four: ProcessWorld, expected: Any) -> None:
    kinds = ((None, 0), ("dp", 1), ("2x2", 3), ("dp", 0))
    found = four.call(RUN("moved"), kinds)[0]
    same(found, expected("moved", ((None, 0),) * 4))
    (values, states), (cut_values, cut_states), whole = found["held"]
    assert states == 2 * values / 4
    assert cut_states == 2 * cut_values < 2 * values
    assert whole == (values, 2 * values)


def test_a_resumed_training_equals_an_uninterrupted_one(four: ProcessWorld, expected: Any, tmp_path: Path) -> None:
    found = four.call(RUN("resumed"), ("2x2", 1), ("dp", 3), str(tmp_path))[0]
    same(found, expected("resumed", (None, 0), None, ""))


@pytest.mark.processes
def test_processes_save_what_none_holds_whole(pair: ProcessWorld, expected: Any, tmp_path: Path) -> None:
    for found in pair.call(RUN("resumed"), ("dp", 3), ("2x2", 0), str(tmp_path)):
        same(found, expected("resumed", (None, 0), None, ""))


@pytest.mark.parametrize(("kind", "zero", "eagerly"), [("2x2", 1, False), ("dp", 3, True)])
def test_a_step_written_by_hand(four: ProcessWorld, expected: Any, kind: str, zero: int, eagerly: bool) -> None:
    found = four.call(RUN("by_hand"), kind, zero, eagerly)[0]
    same(found, expected("by_hand", None, 0, False))
    spread(found, kind, zero, "adam")


@pytest.mark.parametrize("zero", [1, 3])
def test_a_call_and_an_update_outside_of_fit(four: ProcessWorld, zero: int) -> None:
    assert four.call(RUN("outside"), zero)[0]


def test_a_sparse_gradient_is_one_devices(four: ProcessWorld) -> None:
    wanted, _ = four.call("tests.keras.jax.zero:sparse_step", None)[0]
    found, is_cut = four.call("tests.keras.jax.zero:sparse_step", 3)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert is_cut
