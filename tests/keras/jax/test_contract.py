"""The contract on JAX: one device's numbers on the global batch, whatever the optimizer, the loss or the loop."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests import preloaded
from tests.keras.jax.worlds import virtual, with_tensorflow
from tests.support.comparing import same, same_bits
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

RUN = "tests.keras.contract:{}".format
PRELOAD = (*preloaded.KERAS["jax"], "tensorflow")
COUNTED = "tests.keras.counted:{}".format
ALONE = (None, 0)
# Each promise under one strategy; among them every stage of ZeRO, with and without a model axis.
_ONE_BY_ONE = {
    "clipnorm": ("2x2", 1),
    "global clipnorm": ("dp", 3),
    "clipvalue": ("dp", 0),
    "ema": ("2x2", 3),
    "decay": ("2x2", 3),
    "schedule": ("dp", 2),
    "ema at the end": ("dp", 3),
}
_TOGETHER = {
    "clipnorm, schedule, ema": ("2x2", 3),
    "clipvalue, ema at the end": ("dp", 0),
    "global clipnorm, decay": ("dp", 3),
}
# XLA cuts updates of each number as any operation; in "several" a part is Muon's.
_NUMBER_BY_NUMBER = {
    "rmsprop": ("2x2", 2),
    "lion": ("dp", 1),
    "adagrad": ("2x2", 3),
    "nadam": ("dp", 2),
    "muon": ("2x2", 3),
}
OPTIMIZERS = {
    **unless_all(_TOGETHER, _ONE_BY_ONE),
    "overflow": ("2x2", 0),
    "adafactor": ("2x2", 1),
    "scaled accumulation": ("dp", 1),
    "lamb": ("dp", 3),
    "schedule free": ("dp", 3),
    "several": ("2x2", 1),
    **unless_all({}, _NUMBER_BY_NUMBER),
}


@pytest.fixture(scope="module")
def expected(one: ProcessWorld) -> Any:
    return cache(lambda program, *args: one.call(RUN(program), *args)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(four: ProcessWorld, expected: Any, name: str) -> None:
    found = four.call(RUN("optimized"), *OPTIMIZERS[name], name)[0]
    same(found, expected("optimized", *ALONE, name))
    assert found["spread"] == 4
    assert bool(found["sharded"]) == (OPTIMIZERS[name] != ("dp", 0))


def test_an_overflow_skips_the_step(expected: Any) -> None:
    """The case above is one: its first losses overflow, and the scale goes down."""
    scale = expected("optimized", *ALONE, "overflow")["slots"][1]
    assert scale < 2.0**127


def test_averages_outlive_an_evaluation(four: ProcessWorld) -> None:
    """Keras gives the variables the averages' own arrays, which an evaluation on JAX then deletes."""
    assert four.call(RUN("averaged_twice"), "dp", 3)[0] == 8


@pytest.mark.parametrize(
    ("name", "kind", "zero"),
    [
        ("regularized", "2x2", 0),
        ("covariance", "dp", 1),
        ("besides", "dp", 3),
        ("lora", "2x2", 3),
    ],
)
def test_models_and_losses(four: ProcessWorld, expected: Any, name: str, kind: str, zero: int) -> None:
    found = four.call(RUN("built"), kind, zero, name)[0]
    same(found, expected("built", *ALONE, name))
    assert found["spread"] == 4


@pytest.mark.parametrize(("kind", "zero", "name"), [("2x2", 3, "binary"), ("dp", 1, "own")])
def test_metrics(four: ProcessWorld, expected: Any, kind: str, zero: int, name: str) -> None:
    same(four.call(RUN("measured"), kind, zero, name)[0], expected("measured", *ALONE, name))


def test_metrics_are_reduced_with_the_gradients(four: ProcessWorld) -> None:
    """One collective a step, with metrics or without; the two counts and the two sums among them are scalars."""
    counts, sizes = four.call(COUNTED("counts_with_metrics"))[0]
    assert counts == [3, 3]
    assert 0 < sizes[1] - sizes[0] <= 3 * 4 * Fraction(2 * 3 * 4, 4)


@pytest.mark.parametrize(("program", "kind", "zero"), [("toggled", "2x2", 3), ("few", "dp", 3)])
def test_loops(four: ProcessWorld, expected: Any, program: str, kind: str, zero: int) -> None:
    same(four.call(RUN(program), kind, zero)[0], expected(program, *ALONE))


@pytest.mark.parametrize(("name", "zero"), [("plain", 0), ("centred", 1), ("tied", 3), ("spectral", 1)])
def test_tables_and_rows_that_do_not_divide(four: ProcessWorld, expected: Any, name: str, zero: int) -> None:
    found = four.call(RUN("looked_up"), "2x2", zero, name)[0]
    same(found, expected("looked_up", *ALONE, name))
    assert any(path.endswith("table/embeddings") for path in found["sharded"])


@pytest.mark.parametrize(
    ("kind", "zero", "case"), [("dp", 0, "ranked"), ("2x2", 1, "ranked"), ("dp", 0, "ordered"), ("2x2", 0, "ordered")]
)
def test_what_is_sorted_and_transformed(four: ProcessWorld, one: ProcessWorld, kind: str, zero: int, case: str) -> None:
    """Rows of a batch that does not divide, one less than those of a batch that does, and features."""
    program = "tests.keras.mixing:mixed"
    found = four.call(program, kind, zero, case, True)[0]
    same(found, one.call(program, *ALONE, case, True)[0])
    assert found["spread"] == 4


def test_dropout_and_noise_are_one_devices(four: ProcessWorld, expected: Any) -> None:
    """And two runs with one seed are the same to the last bit."""
    once, again = (four.call(RUN("seeded"), "2x2", 1)[0] for _ in range(2))
    same(once, expected("seeded", *ALONE))
    same_bits(again, once)


def test_the_documented_step_of_the_users_own(four: ProcessWorld, one: ProcessWorld) -> None:
    found = four.call("tests.keras.jax.steps:run", "dp", 3)[0]
    same(found, one.call("tests.keras.jax.steps:run", *ALONE)[0])
    assert found["sharded"]


def test_one_place_is_written(four: ProcessWorld, one: ProcessWorld) -> None:
    program = "tests.keras.jax.steps:one_place"
    found, wanted = four.call(program, "dp")[0], one.call(program, None)[0]
    np.testing.assert_array_equal(found["table"], wanted["table"])


@pytest.mark.processes
def test_a_loss_may_need_more_rows_than_a_process_has(pair: ProcessWorld, one: ProcessWorld) -> None:
    """Keras traces it before the first step, with the rows of all."""
    wanted = one.call("tests.keras.alike:mined", *ALONE)[0]
    for found in pair.call("tests.keras.alike:mined", "dp", 3):
        same(found, wanted)


def test_tf_data(expected: Any) -> None:
    with ProcessWorld(
        1, launcher=None, env=with_tensorflow(), setup=virtual, setup_args=(4,), timeout=200, preload=PRELOAD
    ) as world:
        same(world.call(RUN("streamed"), "dp", 1, "tf.data")[0], expected("streamed", *ALONE, "arrays"))
