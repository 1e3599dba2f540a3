"""A run that is stopped at epoch 3 goes on as if it had not been: on another mesh, at another stage of ZeRO, on another
backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parity.compare import assert_same_arrays
from tests.parity.resuming import END, STOP
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, Alone, Worlds

pytestmark = pytest.mark.processes

FIRST = {"torch-2": replace(DATA_2, zero=3), "jax-4": replace(GRID, zero=3), "horovod-2": replace(DATA_2, zero=1)}
THEN = {
    "torch-2": (("torch-4", replace(GRID, zero=1)), ("sim-torch", replace(DATA_4, zero=2)), ("jax-4", DATA_4)),
    "jax-4": (("torch-2", replace(DATA_2, zero=1)), ("horovod-2", replace(DATA_2, zero=3))),
    "horovod-2": (("jax-4", replace(GRID, zero=1)),),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_stopped_run_goes_on_elsewhere(first: str, alone: Alone, worlds: Worlds, tmp_path_factory) -> None:
    folder = str(tmp_path_factory.mktemp("resuming"))
    losses, weights = alone.world("torch").call("tests.parity.resuming:start", None, None, END)[0]
    for begun, _ in worlds.get(first).call("tests.parity.resuming:start", FIRST[first], folder, STOP):
        np.testing.assert_allclose(begun, losses[:STOP], atol=1e-5, rtol=1e-5)
    for setting, spec in THEN[first]:
        assert isinstance(spec, Spec)
        for found, ended in worlds.get(setting).call("tests.parity.resuming:go_on", spec, folder):
            np.testing.assert_allclose(found, losses[STOP:], atol=1e-5, rtol=1e-5, err_msg=setting)
            assert_same_arrays(ended, weights)
