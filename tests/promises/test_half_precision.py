"""Half precision with loss scaling trains as on one device, and weights stay in 32 bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same_in_half_precision
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
BITS = {"mixed_bfloat16": 8, "mixed_float16": 11}
# Each kind on each framework.
PLACES = [
    ("torch-4", "2x2", 3, "mixed_float16"),
    ("horovod-2", "dp", 3, "mixed_bfloat16"),
    ("sim-jax", "dp", 3, "mixed_bfloat16"),
    ("sim-jax", "2x2", 0, "mixed_float16"),
    ("tensorflow-4", "2x2", 3, "mixed_float16"),
    ("horovod-2-tensorflow", "dp", 0, "mixed_bfloat16"),
]
EVERY = [(*place[:3], policy) for place in PLACES for policy in BITS]


def mixed(kind: str | None, zero: int, policy: str) -> dict[str, Any]:
    import keras

    from tests.support import nets

    keras.config.set_dtype_policy(policy)
    try:
        with nets.begun(kind, zero):
            scaled = keras.optimizers.LossScaleOptimizer(nets.adam(), initial_scale=2.0**8)
            model = nets.crossed(nets.plain(), scaled)
        found = nets.fitted_on_even(model)
        return {**found, "dtypes": sorted({str(v.dtype) for v in model.trainable_variables})}
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(("setting", "kind", "zero", "policy"), unless_all(PLACES, EVERY))
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, policy: str, worlds: Worlds, alone: Alone) -> None:
    wanted = alone.run(SETTINGS[setting].keras, mixed, None, 0, policy)
    for found in worlds.get(setting).call(mixed, kind, zero, policy):
        assert found["dtypes"] == ["float32"]
        same_in_half_precision(found, wanted, BITS[policy])
        assert bool(found["sharded"]) == (zero > 0 or kind != "dp")
