"""A checkpoint of a distributed model becomes a file that Keras loads on one device, on each of its backends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.worlds import ALONE, GRID, Alone, Worlds

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def written(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(folder of a checkpoint, predictions of the model)."""
    folder = str(tmp_path_factory.mktemp("exported"))
    return folder, worlds.get("sim-torch").call("tests.parity.exporting:train", folder, replace(GRID, zero=3))[0]


@pytest.mark.parametrize("keras", sorted(ALONE))
def test_keras_loads_what_is_exported_and_it_is_the_model(
    keras: str, written: tuple[str, Any], alone: Alone, tmp_path: Path
) -> None:
    folder, predictions = written
    out = str(tmp_path / "model.keras")
    world = alone.world(keras)
    assert world.call("tests.parity.exporting:export", folder, out)[0][0] == 0
    found, steps, variables = world.call("tests.parity.exporting:load", out)[0]
    np.testing.assert_allclose(found, predictions, rtol=1e-5, atol=1e-5)
    # Iteration, learning rate, and two slots for each of four variables.
    assert (steps, variables) == (1, 10)


def test_an_export_holds_some_variables_and_not_the_model(alone: Alone, tmp_path: Path) -> None:
    world = alone.world("torch")
    folder, nbytes = str(tmp_path / "in"), world.call("tests.parity.exporting:write_large", str(tmp_path / "in"))[0]
    # The first one imports what Keras needs to write.
    _, (code, held) = (world.call("tests.parity.exporting:export", folder, str(tmp_path / name))[0] for name in FILES)
    assert code == 0
    assert (tmp_path / FILES[1]).stat().st_size > nbytes
    assert held < nbytes / 2


def test_what_follows_from_restored_values_follows(alone: Alone, tmp_path: Path) -> None:
    """Normalization computes with what it has made of its variables: on JAX these are other arrays."""
    wanted, found = alone.world("jax").call("tests.parity.exporting:restore_scaling", str(tmp_path))[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_one_process_writes_for_orbax(worlds: Worlds, tmp_path: Path) -> None:
    """At once: the others would not wait for what it writes while training goes on."""
    found = worlds.get("torch-2").call("tests.parity.exporting:write_by_orbax", str(tmp_path))
    assert found == [([0, 1], 0.0), ([], 0.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_one_process_writes_a_model_without_variables(worlds: Worlds, tmp_path: Path) -> None:
    found = worlds.get("torch-2").call("tests.parity.exporting:save_without_variables", str(tmp_path))
    assert found == [2, 0]


FILES = ("first.keras", "second.keras")
