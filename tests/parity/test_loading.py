"""Files of models are loaded in place: no process ever holds more than its shards and a part of one variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.compare import assert_same_values
from tests.parity.loading import KERNEL, KINDS, NAMES, SIZE
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, MODEL_2, SETTINGS, Alone, Worlds

pytestmark = pytest.mark.processes

ZERO_2 = Spec("data", DATA_2.axes, zero=3)
ZERO_4 = Spec("data", (("data", 4),), zero=3)
MODEL_4 = Spec("model", (("model", 4),))
PLACES = [("torch-2", MODEL_2), ("torch-2", ZERO_2), ("jax-2x2", MODEL_4), ("tensorflow-2x2", ZERO_4)]
# Besides arrays: what Keras and h5py make of configurations and names.
SOME = KERNEL // 4


@pytest.fixture(scope="module")
def written(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("written")
    return folder, alone.world("torch").call("tests.parity.loading:write", str(folder))[0]


@pytest.mark.parametrize(("setting", "spec"), PLACES, ids=lambda p: p if isinstance(p, str) else p.name)
@pytest.mark.parametrize("name", NAMES)
def test_a_process_reads_its_shards(
    name: str, setting: str, spec: Spec, written: tuple[Path, Any], worlds: Worlds
) -> None:
    """Bit for bit; each of two processes reads halves, and may hold two. The second load is measured: the first
    imports."""
    folder, wanted = written
    # Halves of a kernel; two are held at a time. JAX and TensorFlow hold shards in NumPy's memory, and on
    # TensorFlow process 0 sends a model's first values.
    halves = {"torch": 2, "jax": 4, "tensorflow": 6}[SETTINGS[setting].keras]
    x = np.random.default_rng(1).normal(size=(4, SIZE)).astype("float32")
    for k in range(3):
        x = x @ wanted[f"dense{k}/kernel"] + wanted[f"dense{k}/bias"]
    for found in worlds.get(setting).call("tests.parity.loading:loaded", name, spec, str(folder)):
        assert_same_values(found.values, wanted, 0.0)
        assert found.local in ((SIZE, SIZE // dict(spec.axes).get("model", 1)), (SIZE // spec.size("data"), SIZE))
        assert found.local != (SIZE, SIZE)
        assert found.largest in (SIZE * SIZE // 2, SIZE * SIZE // 4)  # of one device's shard
        # On TensorFlow what a .keras archive takes is no less than the model where kernels are as small as here.
        if SETTINGS[setting].keras != "tensorflow" or name != "model.keras":
            assert found.peak < KERNEL / 2 * halves + SOME
        np.testing.assert_allclose(found.predict, x, atol=1e-4)  # products of 1024 numbers, three times


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_ranks_and_integers_are_loaded_as_on_one_device(
    kind: str, setting: str, alone: Alone, worlds: Worlds, tmp_path: Path
) -> None:
    keras = SETTINGS[setting].keras
    wanted, predicted = alone.world(keras).call("tests.parity.loading:write_kind", kind, str(tmp_path))[0]
    found, rows, is_cut = worlds.get(setting).call("tests.parity.loading:loaded_kind", MODEL_4, str(tmp_path))[0]
    assert is_cut
    assert_same_values(found, wanted, 0.0)
    # bfloat16 has 8 bits: the order of a sum shows.
    np.testing.assert_allclose(
        np.asarray(rows, "float32"),
        np.asarray(predicted, "float32"),
        rtol=1e-5,
        atol=0.02 if kind == "bfloat16" else 1e-4,
    )
