"""The contract on TensorFlow DTensor: one device's numbers on the global batch, on four devices of one process.

(On torch: test_contract; on JAX: tests/keras/jax.)
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.jax.comparing import same
from tests.parity.worlds import Alone, Worlds

pytestmark = pytest.mark.processes

RUN = "tests.keras.contract:{}".format
ALONE = (None, 0)
GRID = ("2x2", 0)
OPTIMIZERS = [
    "clipnorm",
    "global clipnorm",
    "clipvalue",
    "ema",
    "accumulation",
    "decay",
    "scaled",
    "overflow",
    "adafactor",
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return cache(lambda program, *args: alone.world("tensorflow").call(RUN(program), *args)[0])


@pytest.fixture
def everywhere(worlds: Worlds, expected: Any) -> Any:
    def check(program: str, *args: Any) -> None:
        (found,) = worlds.get("tensorflow-4").call(RUN(program), *GRID, *args)
        same(found, expected(program, *ALONE, *args))
        assert found["sharded"]

    return check


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(everywhere: Any, name: str) -> None:
    everywhere("optimized", name)


@pytest.mark.parametrize("name", ["regularized", "covariance", "lora"])
def test_models_and_losses(everywhere: Any, name: str) -> None:
    everywhere("built", name)


@pytest.mark.parametrize("name", ["binary", "own"])
def test_metrics(everywhere: Any, name: str) -> None:
    everywhere("measured", name)


@pytest.mark.parametrize(("policy", "bits"), [("mixed_bfloat16", 8), ("mixed_float16", 11)])
def test_half_precision(worlds: Worlds, expected: Any, policy: str, bits: int) -> None:
    """Sums in another order differ in the last of the bits that a number has, and Adam's steps are of 0.01."""
    (found,) = worlds.get("tensorflow-4").call(RUN("mixed"), *GRID, policy)
    alone = expected("mixed", *ALONE, policy)
    for key in ("history", "evaluate"):
        np.testing.assert_allclose(np.ravel(found[key]["loss"]), np.ravel(alone[key]["loss"]), rtol=2.0 ** (1 - bits))
    for path, value in alone["weights"].items():
        np.testing.assert_allclose(found["weights"][path], value, atol=2.0 ** (2 - bits), err_msg=path)
    assert found["sharded"]


@pytest.mark.parametrize("program", ["toggled", "few"])
def test_loops(everywhere: Any, program: str) -> None:
    everywhere(program)


def test_two_runs_with_one_seed_are_the_same_to_the_last_bit(worlds: Worlds) -> None:
    once, again = (worlds.get("tensorflow-4").call(RUN("seeded"), *GRID)[0] for _ in range(2))
    assert once["history"] == again["history"]
    for path, value in once["weights"].items():
        np.testing.assert_array_equal(again["weights"][path], value)


WRITERS = [("tensorflow-4", "2x2"), ("tensorflow-2x2", "2x2"), ("horovod-2-tensorflow", "dp")]


@pytest.mark.parametrize(("setting", "kind"), WRITERS)
def test_callbacks_write_once_and_decide_alike(
    setting: str, kind: str, worlds: Worlds, expected: Any, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = expected("called_back", *ALONE, str(tmp_path / "one"))
    for process, found in enumerate(worlds.get(setting).call(RUN("called_back"), kind, 0, str(tmp_path / "two"))):
        assert found["shown"] == (0 if process else 2)
        same({**found, "log": "", "shown": 2}, {**alone, "log": ""})
        assert found["stopped"] == alone["stopped"] > 0
        assert found["log"] == str(tmp_path / "two" / "log.csv")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["last.weights.h5", "log.csv"]
    logs = [list(csv.DictReader((tmp_path / n / "log.csv").read_text().splitlines())) for n in ("one", "two")]
    assert [row["epoch"] for row in logs[0]] == [row["epoch"] for row in logs[1]] == ["1", "2"]


@pytest.mark.parametrize(("setting", "kind"), WRITERS[1:])
def test_a_save_that_fails_is_told_and_training_goes_on(
    setting: str, kind: str, worlds: Worlds, expected: Any, tmp_path: Path
) -> None:
    alone = expected("saved_in_part", "", "m.keras", 3, None, 0)
    first, second = worlds.get(setting).call(RUN("saved_in_part"), str(tmp_path), "m.keras", 3, kind, 0)
    assert first["heard"] == "OSError: no space is left"
    assert second["heard"] == f"SavingFailedError: process 0 could not save for all: {first['heard']}"
    for found in (first, second):
        same({**found, "heard": ""}, alone)
