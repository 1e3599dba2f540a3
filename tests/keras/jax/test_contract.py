"""The contract on JAX: one device's numbers on the global batch, whatever the optimizer, the loss or the loop."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.jax.comparing import same
from tests.keras.jax.worlds import virtual, with_tensorflow
from tests.launch.runs import run
from unidist.testing.processes import ProcessWorld

RUN = "tests.keras.contract:{}".format
ALONE = (None, 0)
# Each promise under one strategy; among them every stage of ZeRO, with and without a model axis.
OPTIMIZERS = {
    "clipnorm": ("2x2", 1),
    "global clipnorm": ("dp", 3),
    "clipvalue": ("dp", 0),
    "ema": ("2x2", 3),
    "accumulation": ("dp", 1),
    "decay": ("2x2", 3),
    "scaled": ("dp", 3),
    "overflow": ("2x2", 0),
    "adafactor": ("2x2", 1),
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
        ("regularized", "dp", 3),
        ("covariance", "dp", 1),
        ("covariance", "2x2", 3),
        ("lora", "2x2", 0),
        ("lora", "2x2", 3),
    ],
)
def test_models_and_losses(four: ProcessWorld, expected: Any, name: str, kind: str, zero: int) -> None:
    found = four.call(RUN("built"), kind, zero, name)[0]
    same(found, expected("built", *ALONE, name))
    assert found["spread"] == 4


@pytest.mark.parametrize(("kind", "zero", "name"), [("dp", 0, "binary"), ("2x2", 3, "binary"), ("dp", 1, "own")])
def test_metrics(four: ProcessWorld, expected: Any, kind: str, zero: int, name: str) -> None:
    same(four.call(RUN("measured"), kind, zero, name)[0], expected("measured", *ALONE, name))


@pytest.mark.parametrize(("kind", "zero"), [("2x2", 0), ("dp", 3)])
def test_half_precision(four: ProcessWorld, expected: Any, kind: str, zero: int) -> None:
    """bfloat16 has 8 bits: sums in another order differ by 2**-8 of a value, and Adam's steps are of 0.01."""
    found, alone = four.call(RUN("mixed"), kind, zero, "mixed_bfloat16")[0], expected("mixed", *ALONE, "mixed_bfloat16")
    assert found["dtypes"] == ["float32"]
    for key in ("history", "evaluate"):
        loss, wanted = np.ravel(found[key]["loss"]), np.ravel(alone[key]["loss"])
        np.testing.assert_allclose(loss, wanted, rtol=2**-7)
    for path, value in alone["weights"].items():
        np.testing.assert_allclose(found["weights"][path], value, atol=0.02, err_msg=path)


@pytest.mark.parametrize(("program", "kind", "zero"), [("toggled", "2x2", 3), ("few", "dp", 3), ("few", "2x2", 0)])
def test_loops(four: ProcessWorld, expected: Any, program: str, kind: str, zero: int) -> None:
    same(four.call(RUN(program), kind, zero)[0], expected(program, *ALONE))


@pytest.mark.processes
def test_callbacks_write_once_and_decide_alike(pair: ProcessWorld, expected: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = expected("called_back", *ALONE, str(tmp_path / "one"))
    told = pair.call(RUN("called_back"), "2x2 across", 3, str(tmp_path / "two"))
    for process, found in enumerate(told):
        assert found["shown"] == (0 if process else 2)
        same({**found, "shown": 2}, alone)
        assert found["epochs"] == alone["epochs"] == [1, 2]
        assert found["stopped"] == alone["stopped"] > 0
        assert found["log"] == str(tmp_path / "two" / "log.csv")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["last.weights.h5", "log.csv"]
    logs = [list(csv.DictReader((tmp_path / n / "log.csv").read_text().splitlines())) for n in ("one", "two")]
    assert [row["epoch"] for row in logs[0]] == [row["epoch"] for row in logs[1]] == ["1", "2"]


def test_tf_data(expected: Any) -> None:
    with ProcessWorld(1, launcher=None, env=with_tensorflow(), setup=virtual, setup_args=(4,), timeout=200) as world:
        same(world.call(RUN("streamed"), "dp", 1, "tf.data")[0], expected("streamed", *ALONE, "arrays"))


FAULTY = """
import unidist

unidist.use("jax")
from tests.keras.contract import raising

raising()
"""


@pytest.mark.processes
def test_data_that_raises_on_one_process_ends_the_run(tmp_path: Path) -> None:
    """The others wait for that process in a collective; none is left waiting."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    done = run(["-n", "2", "--backend", "jax", "--devices-per-process", "2", str(script)], tmp_path)
    assert done.code != 0
    assert "the disk of process 1 is gone" in done.out + done.err
    assert done.seconds < 90
