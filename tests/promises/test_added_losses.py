"""A model that learns from what it adds alone, compiled without a loss, trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.conftest import Check
from tests.support.sampling import each_value

pytestmark = pytest.mark.processes
ON_TORCH = [("sim-torch", "dp"), ("torch-2", "dp"), ("torch-4", "2x2"), ("horovod-2", "dp")]
PLACES = [
    *each_value([(setting, kind, zero) for setting, kind in ON_TORCH for zero in (0, 3)]),
    ("sim-jax", "dp", 3),
    ("tensorflow-4", "2x2", 3),
]


def unsupervised(kind: str | None, zero: int) -> dict[str, Any]:
    import keras

    from tests.support import nets
    from tests.support.runs import told

    class Squeezed(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="squeezed")
            self.up = keras.layers.Dense(16, "tanh", name="a")
            self.down = keras.layers.Dense(12, name="b")

        def build(self, shape: Any) -> None:
            self.up.build(shape)
            self.down.build((None, 16))
            self.built = True

        def call(self, x: Any) -> Any:
            found = self.down(self.up(x))
            self.add_loss(keras.ops.mean(keras.ops.square(found - x)))
            return found

    x, _ = nets.rows()
    with nets.begun(kind, zero):
        model = Squeezed()
        model.build((None, 12))
        model.compile(nets.adam())
    history = model.fit(x, batch_size=nets.BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, as_alone: Check) -> None:
    as_alone(setting, kind, zero, unsupervised)
