"""Where one device's gradient overflows, all skip the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity.worlds import Worlds
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
PLACES = [
    *(
        ("sim-torch", "dp", 1),
        ("torch-2", "dp", 0),
        ("torch-2", "dp", 3),
        ("torch-4", "2x2", 1),
        ("horovod-2", "dp", 2),
    ),
    ("sim-jax", "2x2", 3),
    ("tensorflow-2x2", "2x2", 1),
    # Of Keras's scaling, which sees the joined gradients: over torch above.
    *unless_all([], [("horovod-2-tensorflow", "dp", 0), ("tensorflow-4", "2x2", 3)]),
]


def overflowed(kind: str | None, zero: int) -> dict[str, Any]:
    """One row of eight makes the gradient of one kernel overflow, for three steps: its rank's, and no other's."""
    import keras

    from tests.support import nets
    from tests.support.runs import told

    x, y = nets.rows(8)
    x[5, 0] = 1e30
    with nets.begun(kind, zero):
        # Of zeros, so that the row's outputs are those of any other.
        first = keras.layers.Dense(16, "tanh", name="a", kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((12,)), first, *nets.plain().layers[1:]], name="plain")
        scaled = keras.optimizers.LossScaleOptimizer(nets.adam(), initial_scale=2.0**100)
        nets.crossed(model, scaled)
        model.optimizer.build(model.trainable_variables)
    before = told(model)["weights"]
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return {"before": before, **told(model)}


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_all_skip_the_step(setting: str, kind: str, zero: int, worlds: Worlds) -> None:
    for found in worlds.get(setting).call(overflowed, kind, zero):
        assert 2.0**97 in [float(slot) for slot in found["slots"] if slot.ndim == 0]
        for path, value in found["before"].items():
            np.testing.assert_array_equal(found["weights"][path], value)
