"""What the processes of test_devices run: each in a process of its own, before JAX has started."""

from __future__ import annotations

import os
import sys

import unidist
from unidist.errors import BackendMismatchError


def counted(when: str) -> tuple[int, bool]:
    """The number of devices JAX has after use("sim", devices=4), and whether JAX was imported by `use` itself."""
    if when == "jax is imported":
        import jax
    if when == "keras is imported":
        import keras
    unidist.use("sim", devices=4)
    imported = "jax" in sys.modules
    import jax
    import keras

    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    assert int(os.environ["PJRT_NPROC"]) >= 32
    return len(jax.devices()), imported


def started_before(count: int) -> str:
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    import jax
    import keras

    jax.devices()
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    try:
        unidist.use("sim", devices=4)
    except BackendMismatchError as error:
        return str(error)
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    return f"on {len(model.weights[0].value.sharding.device_set)} of {len(jax.devices())}"
