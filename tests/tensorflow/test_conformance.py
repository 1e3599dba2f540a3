"""The tensorflow backend obeys the laws: eight virtual devices in one process, and two processes with two each.

All of it runs in processes of its own: TensorFlow makes its devices once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from tests.visible import WITH_TENSORFLOW
from unidist.backends.protocol import Array
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World


def _world(backend: Any, layout_pairs: int) -> World:
    import tensorflow as tf

    def vjp(function: Callable[[Any], Any], x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = function(x)
        return tape.gradient(found, x, output_gradients=y)

    def array(value: Array, dtype: str) -> Any:
        return tf.cast(tf.constant(np.asarray(value)), tf.as_dtype(dtype))

    def numpy(x: Any) -> Array:
        found: Array = (tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x).numpy()
        return found

    return World(backend=backend, array=array, numpy=numpy, vjp=vjp, layout_pairs=layout_pairs)


def eight_devices() -> World:
    return _world(unidist.use("tensorflow", devices=8), unless_all(6, 12))


def two_devices_each() -> World:
    return _world(unidist.use("tensorflow", devices=2), unless_all(3, 4))


@pytest.mark.slow
class TestEightDevices(ConformanceSuite):
    backend = "tensorflow"
    world = f"{__name__}:eight_devices"
    processes = 1
    preload = preloaded.TENSORFLOW
    launcher = None
    env = WITH_TENSORFLOW
    timeout = 280.0


@pytest.mark.slow
@pytest.mark.processes
class TestTwoProcesses(ConformanceSuite):
    backend = "tensorflow"
    world = f"{__name__}:two_devices_each"
    processes = 2
    preload = preloaded.TENSORFLOW
    env = WITH_TENSORFLOW
    timeout = 280.0
