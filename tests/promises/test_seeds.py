"""Two runs with one seed are the same to the last bit, and what is drawn differs where rows and units are cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same, same_bits

pytestmark = pytest.mark.processes
# What processes agree on, one does; Horovod reduces in the same order, whatever framework it serves.
PLACES = [
    *(("torch-2", "dp", 3), ("torch-4", "2x2", 3), ("horovod-2", "dp", 3)),
    *(("sim-jax", "2x2", 1), ("tensorflow-2x2", "2x2", 1), ("horovod-2-tensorflow", "dp", 0)),
]


def seeded(kind: str | None, zero: int) -> dict[str, Any]:
    """Noise and dropout; in the history how many units of one half of the rows, or of the units, are kept where those
    of the other are not."""
    import keras
    from keras import layers, ops

    from tests.support import nets
    from tests.support.runs import told

    def between_rows(y: Any, p: Any) -> Any:
        kept = ops.cast(p != 0, "float32")
        return ops.mean(ops.abs(kept[:4] - kept[4:]))

    def between_units(y: Any, p: Any) -> Any:
        kept = ops.cast(p != 0, "float32")
        return ops.mean(ops.abs(kept[:, :8] - kept[:, 8:]))

    x, _ = nets.rows(16)
    with nets.begun(kind, zero, {".*a/kernel": (None, "model")}):
        first, drop = layers.Dense(16, name="a"), layers.Dropout(0.5, name="drop")
        model = keras.Sequential([layers.Input((12,)), layers.GaussianNoise(0.5, name="noise"), first, drop])
        model.compile(nets.adam(), "mse", metrics=[between_rows, between_units])
    y = 0 * x[:, :1] + [[1.0] * 16]
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_runs_with_one_seed_are_the_same(setting: str, kind: str, zero: int, worlds: Worlds, alone: Alone) -> None:
    """On JAX they are one device's too. Of independent numbers about half differ; of equal ones none."""
    once, again = (worlds.get(setting).call(seeded, kind, zero) for _ in range(2))
    for found in (*once, *again):
        same_bits(found, once[0])
        for name in ("between_rows", "between_units"):
            assert 0.25 < found["history"][name][0] < 0.75
    if SETTINGS[setting].keras == "jax":
        same(once[0], alone.run("jax", seeded, None, 0))
