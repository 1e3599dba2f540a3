"""Saving under a strategy writes one device's file, once; it loads under any other strategy and on one device."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parity.compare import assert_same_arrays, assert_same_logs, assert_same_values
from tests.parity.models import CASES
from tests.parity.train import Saved
from tests.parity.worlds import DATA_2, DATA_4, GRID, MODEL_2, MODEL_4, SETTINGS, Alone, Worlds
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

CASE = "mlp_ragged_adam"
FILES = [*(f"epoch{k + 1}.keras" for k in range(CASES[CASE].epochs)), "model.keras", "model.weights.h5"]


@dataclass(frozen=True)
class Written:
    """A training that was saved into a folder."""

    setting: str
    folder: Path
    saved: list[Saved]

    @property
    def keras(self) -> str:
        return SETTINGS[self.setting].keras


# On TensorFlow each load compiles for seconds; two processes there are below.
PLACES = [
    *(("torch-2", MODEL_2), ("torch-4", GRID), ("jax-4", GRID), ("tensorflow-4", GRID)),
    *unless_all([], [("sim-torch", MODEL_4), ("tensorflow-4", DATA_4)]),
]


@pytest.fixture(
    scope="module",
    params=PLACES,
    ids=lambda p: f"{p[0]}-{p[1].name}",
)
def written(request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Written:
    setting, spec = request.param
    folder = tmp_path_factory.mktemp("saved")
    return Written(setting, folder, worlds.get(setting).call("tests.parity.train:save", CASE, spec, str(folder)))


def test_every_process_sees_whole_files_once_saving_returns(written: Written) -> None:
    for saved in written.saved:
        assert saved.files == FILES
    for name in FILES:
        if name.endswith(".keras"):
            assert zipfile.ZipFile(written.folder / name).testzip() is None


def test_one_device_loads_it_and_trains_on(written: Written, alone: Alone) -> None:
    result = alone.run(written.keras, "tests.parity.train:load_and_go_on", CASE, None, str(written.folder))
    assert_same_arrays(result.start, written.saved[0].weights, 0.0)
    assert_same_values(result.predict, written.saved[0].predict)
    assert_same_arrays(result.start, alone.train(written.keras, CASE).weights)


def test_another_strategy_loads_it_and_trains_on_as_one_device(written: Written, alone: Alone, worlds: Worlds) -> None:
    """On the same Keras backend; across them goes test_resuming.py."""
    places = {
        "torch": (("torch-4", MODEL_4), ("torch-2", DATA_2), ("sim-torch", DATA_4)),
        "jax": (("jax-4", MODEL_4), ("jax-4", DATA_4), ("sim-jax", GRID)),
        "tensorflow": (("tensorflow-4", MODEL_4), ("tensorflow-4", DATA_4), ("sim-tensorflow", GRID)),
    }
    every, folder = places[written.keras], str(written.folder)
    one = every[{"torch-2": 0, "torch-4": 1}.get(written.setting, 2)]
    wanted = alone.run(written.keras, "tests.parity.train:load_and_go_on", CASE, None, folder)
    for setting, spec in unless_all((one,), every):
        for result in worlds.get(setting).call("tests.parity.train:load_and_go_on", CASE, spec, folder):
            assert_same_arrays(result.start, written.saved[0].weights, 0.0)
            assert_same_values(result.predict, wanted.predict)
            assert_same_logs(result.logs, wanted.logs)
            assert_same_values(result.weights, wanted.weights)
            assert any(row.is_sharded for row in result.variables) == (spec.kind == "model")
            assert sum(count for count, _ in result.traffic.values()) > 0


def test_weights_alone_are_whole_and_load_everywhere(written: Written, alone: Alone, worlds: Worlds) -> None:
    folder = str(written.folder)
    found = alone.world(written.keras).call("tests.parity.train:load_weights", CASE, None, folder)[0]
    assert_same_values(found, written.saved[0].weights, 0.0)
    places = [("torch-2", MODEL_2), ("sim-torch", GRID), ("jax-4", MODEL_4), ("tensorflow-4", MODEL_4)]
    # One file is as another: what two processes wrote is read by all, what others wrote by another Keras backend.
    others = places[2:3] if written.keras == "torch" else places[:1]
    for setting, spec in places if written.setting == "torch-2" else unless_all(others, places):
        for found in worlds.get(setting).call("tests.parity.train:load_weights", CASE, spec, folder):
            assert_same_values(found, written.saved[0].weights, 0.0)


def test_processes_on_tensorflow_write_once_and_load(alone: Alone, worlds: Worlds, tmp_path: Path) -> None:
    """One of them writes the whole, as one device would."""
    world, spec, folder = worlds.get("horovod-2-tensorflow"), DATA_2, str(tmp_path)
    for saved in world.call("tests.parity.train:save", CASE, spec, folder):
        assert saved.files == FILES
        assert_same_values(saved.weights, alone.train("tensorflow", CASE).weights)
    wanted = alone.world("tensorflow").call("tests.parity.train:load_and_go_on", CASE, None, folder)[0]
    assert_same_arrays(wanted.start, saved.weights, 0.0)
    for result in world.call("tests.parity.train:load_and_go_on", CASE, spec, folder):
        assert_same_arrays(result.start, wanted.start, 0.0)
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)
    for found in world.call("tests.parity.train:load_weights", CASE, spec, folder):
        assert_same_values(found, saved.weights, 0.0)
