"""The tensorflow backend obeys the laws: eight virtual devices in one process, and two processes with two each.

All of it runs in processes of its own: TensorFlow makes its devices once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.support import flights
from tests.support.sampling import unless_all
from tests.visible import OF_KERAS
from unidist import events
from unidist.backends.protocol import Array
from unidist.errors import ProcessLostError
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World
from unidist.testing.processes import ProcessWorld

# Whichever Keras the tests before have run on.
ON_TENSORFLOW = OF_KERAS["tensorflow"]
# The ops are the same whether their devices are in one process or in two: what eight show in one.
OF_ONE_PROCESS = frozenset(
    [
        *("dtypes", "gradients_of_broadcast_and_permute", "redistribute_empty", "redistribute_scalar"),
        *("redistribute_many_dims", "ledger_of_broadcast_and_permute"),
    ]
)


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

    return World(
        backend=backend, array=array, numpy=numpy, vjp=vjp, layout_pairs=layout_pairs, layouts=unless_all(2, None)
    )


def eight_devices() -> World:
    return _world(unidist.use("tensorflow", devices=8), unless_all(2, 12))


def two_devices_each() -> World:
    return _world(unidist.use("tensorflow", devices=2), unless_all(2, 4))


@pytest.mark.slow
class TestEightDevices(ConformanceSuite):
    backend = "tensorflow"
    world = f"{__name__}:eight_devices"
    processes = 1
    preload = preloaded.KERAS["tensorflow"]
    launcher = None
    env = ON_TENSORFLOW
    timeout = 280.0


@pytest.mark.slow
@pytest.mark.processes
class TestTwoProcesses(ConformanceSuite):
    backend = "tensorflow"
    world = f"{__name__}:two_devices_each"
    processes = 2
    left_out = unless_all(OF_ONE_PROCESS, frozenset())
    preload = preloaded.KERAS["tensorflow"]
    env = ON_TENSORFLOW
    timeout = 280.0


def join_for_seconds(seconds: float) -> None:
    unidist.use("tensorflow", devices=1)  # joins, as the launcher says
    unidist.initialize(timeout=seconds)
    assert flights.here().timeout == seconds


def late_for(seconds: float) -> str:
    """Process 1 comes to the barrier too late for process 0; what that one raises."""
    name = "all_reduce of int32 (16,) over ('rank',) of processes 0, 1 for 'entries'"
    with events.for_purpose("entries"):
        found = flights.since(unidist.backend().barrier)
    assert flights.said(found) == [(name, 1, "ended")]
    if unidist.process_index() == 1:
        time.sleep(3 * seconds)
        return ""
    with pytest.raises(ProcessLostError) as caught:
        unidist.backend().barrier()
    assert flights.how(flights.here().entries[-1]) == "failed"
    return str(caught.value)


def test_initialize_changes_the_timeout_of_a_launchers_world() -> None:
    with ProcessWorld(
        2,
        setup=join_for_seconds,
        setup_args=(1.0,),
        env=ON_TENSORFLOW,
        timeout=60,
        preload=preloaded.KERAS["tensorflow"],
    ) as world:
        outcome = world.outcomes(late_for, 1.0)[0]
    assert outcome.failure is None, outcome.failure
    assert "processes [1] were not there after 1 s" in outcome.value
