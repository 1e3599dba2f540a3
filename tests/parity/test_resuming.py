"""A run that is stopped at epoch 3 goes on as if it had not been: on another mesh, at another stage of ZeRO, on another
backend, on one device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parity.compare import assert_same_arrays
from tests.parity.resuming import END, STOP
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, MODEL_4, Alone, Worlds

pytestmark = pytest.mark.processes

Place = tuple[str, Spec | None]

# Where it begins, and where it goes on.
ROUTES: tuple[tuple[tuple[str, Spec], tuple[Place, ...]], ...] = (
    (
        ("torch-2", replace(DATA_2, zero=3)),
        (
            ("torch-4", replace(GRID, zero=1)),
            ("sim-torch", replace(DATA_4, zero=2)),
            ("jax-4", DATA_4),
            ("tensorflow-4", GRID),
        ),
    ),
    (
        ("jax-4", replace(GRID, zero=3)),
        (("torch-2", replace(DATA_2, zero=1)), ("horovod-2", replace(DATA_2, zero=3)), ("tensorflow-4", MODEL_4)),
    ),
    (("horovod-2", replace(DATA_2, zero=1)), (("jax-4", replace(GRID, zero=1)),)),
    (
        ("tensorflow-4", GRID),
        (
            ("sim-torch", MODEL_4),
            ("torch-2", replace(DATA_2, zero=1)),
            ("jax-4", replace(DATA_4, zero=3)),
            ("tensorflow-alone", None),
            ("torch-alone", None),
            ("jax-alone", None),
        ),
    ),
)


@pytest.mark.parametrize(("first", "then"), ROUTES, ids=[f"{setting}-{spec.name}" for (setting, spec), _ in ROUTES])
def test_a_stopped_run_goes_on_elsewhere(
    first: Place, then: tuple[Place, ...], alone: Alone, worlds: Worlds, tmp_path_factory
) -> None:
    folder = str(tmp_path_factory.mktemp("resuming"))
    losses, weights = alone.world("torch").call("tests.parity.resuming:start", None, None, END)[0]
    for begun, _ in worlds.get(first[0]).call("tests.parity.resuming:start", first[1], folder, STOP):
        np.testing.assert_allclose(begun, losses[:STOP], atol=1e-5, rtol=1e-5)
    for setting, spec in then:
        world = worlds.get(setting) if spec is not None else alone.world(setting.removesuffix("-alone"))
        for found, ended in world.call("tests.parity.resuming:go_on", spec, folder):
            np.testing.assert_allclose(found, losses[STOP:], atol=1e-5, rtol=1e-5, err_msg=setting)
            assert_same_arrays(ended, weights)
