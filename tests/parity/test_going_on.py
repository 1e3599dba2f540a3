"""A training that is ended inside of an epoch, and started again by its program, gives the numbers of one that was
not: `unidist.Checkpoint` on every backend, with every kind of data.

The program that goes on has another seed, as programs without one have, where the data's order is not made before fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.going_on import ARRAYS, OF_PYTHON, OF_TENSORFLOW, OF_TORCH, ROWS, Told
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, Alone, Worlds
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.parity.interrupted:run"
# The epoch and the batch before which a training is ended; it was saved a batch earlier.
INSIDE, BETWEEN = (1, 3), (2, -1)
# Sources with an order that hangs on the seed of the program, since it is chosen before fit begins.
SEEDED = OF_TENSORFLOW
# Sources whose every epoch is all rows, each once.
WHOLE = ["arrays", "arrays by batches", "PyDataset", "DataLoader", "DataLoader with a generator", "tf.data"]

VIRTUAL = ("sim-torch", "jax-4", "tensorflow-4")
# Keras alone, and strategies in the simulator and on JAX's and TensorFlow's virtual devices; dropout everywhere.
PLACES: list[tuple[str, Spec | None, str]] = [
    *(("torch-alone", None, source) for source in (*ARRAYS, *OF_PYTHON, *OF_TORCH)),
    *(("sim-torch", DATA_4, source) for source in ("arrays", "PyDataset", "DataLoader")),
    ("jax-alone", None, "PyDataset"),
    # Those of one process as well: what processes do below, one does.
    *unless_all([], [("jax-4", GRID, "arrays"), ("tensorflow-4", GRID, "arrays")]),
    *(("tensorflow-alone", None, source) for source in ("tf.data", "tf.data of unknown length")),
    # Real processes.
    *(("torch-2", DATA_2, source) for source in ("arrays", "PyDataset", "DataLoader with a generator")),
    ("torch-2", DATA_2, "DataLoader with workers"),
    ("horovod-2", DATA_2, "arrays"),
    ("horovod-2-tensorflow", DATA_2, "tf.data"),
    ("jax-2x2", GRID, "arrays"),
    ("tensorflow-2x2", GRID, "PyDataset"),
]


def call(setting: str, alone: Alone, worlds: Worlds | None = None) -> Any:
    """Calls the program in the setting's processes; each returns what it came to."""
    name = setting.removesuffix("-alone")
    world = alone.world(name) if worlds is None or name != setting else worlds.get(setting)
    return lambda *args, **options: world.call(RUN, *args, **options)


def assert_went_on(found: Told, whole: Told, first: tuple[int, int], tolerance: float = 1e-6) -> None:
    """It ended as the whole training did, and did what was left of it."""
    assert found.raised == ""
    assert found.epochs == whole.epochs
    assert found.history.keys() == whole.history.keys()
    for name, values in whole.history.items():
        np.testing.assert_allclose(found.history[name], values, atol=tolerance, rtol=tolerance, err_msg=name)
    for path, value in whole.weights.items():
        np.testing.assert_allclose(found.weights[path], value, atol=tolerance, rtol=tolerance, err_msg=path)
    for own, value in zip(found.slots, whole.slots, strict=True):
        np.testing.assert_allclose(own, value, atol=tolerance, rtol=tolerance)
    assert found.rate == pytest.approx(whole.rate, rel=1e-6)
    assert found.steps[0] == first
    assert found.steps == whole.steps[-len(found.steps) :]
    assert found.counted == whole.counted


@pytest.mark.parametrize(
    ("setting", "spec", "source"), PLACES, ids=[f"{setting}-{source}" for setting, _, source in PLACES]
)
def test_a_training_goes_on_inside_an_epoch(
    setting: str, spec: Spec | None, source: str, alone: Alone, worlds: Worlds, tmp_path: Path
) -> None:
    run, folder = call(setting, alone, worlds), str(tmp_path)
    options: dict[str, Any] = {"dropout": 0.25 if spec is None or setting in VIRTUAL else 0.0}
    if setting.startswith("tensorflow-"):
        # Its steps, and what each process brings to a file, take long.
        options |= {"every": 8, "epochs": 2}
    elif source == "DataLoader with workers":
        # Each epoch of each process starts them anew.
        options["epochs"] = 2
    whole = run(spec, source, None, **options)[0]
    # Of counted epochs the third has the first iterator that an epoch made which had another's.
    epoch = 2 if source == "counted epochs" else 1
    stopped = run(spec, source, folder, (epoch, 3), **options)[0]
    assert (stopped.raised, stopped.steps[-1]) == ("StopTestError", (epoch, 2))
    for found in run(spec, source, folder, seed=7 if source in SEEDED else 99, **options):
        assert_went_on(found, whole, (epoch, 2))
        # NumPy's and Python's numbers too, which are drawn when epochs begin and end: not when one begins again.
        assert found.random[1:] == whole.random[-len(found.random) + 1 :]
        if source in WHOLE:
            assert found.history["amiss"] == [0.0] * len(whole.epochs)
        if source == "PyDataset" and not setting.startswith("tensorflow"):
            # What it gave in all, but for the batch that each program builds its model from: no row is read again.
            assert found.asked[-10:] == whole.asked[-10:]
            assert len(found.asked) <= 11


def test_rows_are_counted_at_all(alone: Alone) -> None:
    """The whole training's epochs show every row once, in another order each; short ones do not show all."""
    run = call("torch-alone", alone)
    whole = run(None, "PyDataset", None)[0]
    assert whole.history["amiss"] == [0.0, 0.0, 0.0]
    epochs = [[row for rows in whole.asked[-18:][k : k + 6] for row in rows] for k in (0, 6, 12)]
    assert [sorted(rows) for rows in epochs] == [list(range(ROWS))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert run(None, "short epochs", None)[0].history["amiss"] == [14.0, 14.0, 16.0]


@pytest.mark.parametrize("source", ["short epochs", "PyDataset", "DataLoader with a generator"])
def test_a_training_goes_on_between_epochs(source: str, alone: Alone, tmp_path: Path) -> None:
    """With validation in each of them."""
    run = call("torch-alone", alone)
    options = {"every": "epoch", "validate": True}
    whole = run(None, source, None, **options)[0]
    run(None, source, str(tmp_path), BETWEEN, **options)
    found = run(None, source, str(tmp_path), **options)[0]
    assert_went_on(found, whole, (2, 0))
    assert found.random == whole.random[-2:]
    assert len(found.history["val_loss"]) == 3


def test_a_training_goes_on_on_another_number_of_processes(alone: Alone, worlds: Worlds, tmp_path: Path) -> None:
    whole = call("torch-alone", alone, worlds)(None, "arrays", None, dropout=0.0)[0]
    call("torch-2", alone, worlds)(DATA_2, "arrays", str(tmp_path), INSIDE, dropout=0.0, every=1)
    call("sim-torch", alone, worlds)(GRID, "arrays", str(tmp_path), (1, 5), dropout=0.0, every=1)
    found = call("torch-alone", alone, worlds)(None, "arrays", str(tmp_path), dropout=0.0)[0]
    assert_went_on(found, whole, (1, 5), 1e-5)


def test_process_0s_clock_says_when_all_save(worlds: Worlds, tmp_path: Path) -> None:
    run = "tests.parity.interrupted:by_the_clock"
    for found in worlds.get("torch-2").call(run, DATA_2, str(tmp_path)):
        assert found == [3, 6, 9, 12]


def test_steps_that_are_executed_together(alone: Alone, tmp_path: Path) -> None:
    """A save is made where an execution ends: after four batches, though one is due after three."""
    run, options = call("jax-alone", alone), {"steps_per_execution": 2, "every": 3}
    whole = run(None, "arrays", None, **options)[0]
    run(None, "arrays", str(tmp_path), (1, 4), **options)
    found = run(None, "arrays", str(tmp_path), seed=99, **options)[0]
    assert_went_on(found, whole, (1, 2))
