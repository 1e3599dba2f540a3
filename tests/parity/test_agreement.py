"""Processes that were given another model, optimizer, loss, argument or weights than the others get an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.worlds import Worlds

pytestmark = pytest.mark.processes

PLACES = ("torch-2", "jax-2x2", "tensorflow-2x2", "horovod-2-tensorflow")
# What the last process is given otherwise (tests/keras/agreement.py), and words of the error.
TOLD = {
    "learning rate": "optimizer.learning_rate is 0.0",
    "clipnorm": "optimizer.clipnorm is ",
    "optimizer": "the optimizer is ",
    "loss": "the loss is ",
    "weights": "has other values on ranks [",
    "bins": "the bins of layer 'bins' is ",
    "a callback": "epoch 1: optimizer.learning_rate is 0.0",
    "epochs": "the argument epochs is ",
    "nothing": "",
}
# Variables on DTensor are not compared: all take the first process's values when they are placed.
CASES = [(setting, how) for setting in PLACES for how in TOLD if (setting, how) != ("tensorflow-2x2", "weights")]


@pytest.mark.parametrize(("setting", "how"), CASES)
def test_what_differs_is_told(setting: str, how: str, worlds: Worlds) -> None:
    results = worlds.get(setting).call("tests.keras.agreement:fitted", how)
    for told, loss in results:
        assert TOLD[how] in told
        assert bool(told) == (how != "nothing")
        assert (loss > 0) == (how == "nothing")
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        (setting, what)
        for setting in PLACES
        for what in ("weights", "model")
        if what == "weights" or "2x2" not in setting
    ],
)
def test_a_file_that_one_process_lacks_is_told_to_all(setting: str, what: str, worlds: Worlds, tmp_path: Path) -> None:
    (first, text), (other, own) = worlds.get(setting).call("tests.keras.agreement:loaded", str(tmp_path / "m"), what)
    assert first == "LoadingFailedError"
    assert "could not load" in text
    assert other in ("FileNotFoundError", "ValueError")
    assert "elsewhere" in own


@pytest.mark.parametrize("setting", PLACES)
def test_the_first_process_writes_the_log(setting: str, worlds: Worlds) -> None:
    mesh = {"data": 4 if "2x2" in setting else 2}
    line = f"INFO: model 'net' under DataParallel on Mesh({mesh}): 0 of 2 variables cut, batches over 'data', zero=0"
    world = worlds.get(setting)
    assert world.call("tests.keras.agreement:logged", "first") == [[f"unidist 0 {line}"], []]
    assert world.call("tests.keras.agreement:logged", "all") == [[f"unidist {k} {line}"] for k in (0, 1)]
