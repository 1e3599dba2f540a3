"""The horovod backend obeys the laws over torch and over TensorFlow, with two and with four real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from tests.visible import OF_KERAS
from unidist.backends.protocol import Array
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World

# Whichever Keras the tests before have run on.
ON_TENSORFLOW = OF_KERAS["tensorflow"]
# What four processes show for groups of two and of all.
OF_FOUR = frozenset(
    [
        *("reductions", "gradients", "gradients_of_broadcast_and_permute", "redistribute_even", "redistribute_uneven"),
        *("redistribute_empty", "redistribute_scalar", "redistribute_many_dims", "broadcast", "permute", "ledger"),
    ]
)


def torch_world(layout_pairs: int = 60) -> World:
    """Called in each process, under a launcher's environment: process 0 serves Horovod's rendezvous."""
    return World(
        backend=unidist.use("horovod"),
        array=_tensor,
        numpy=_array,
        vjp=_vjp,
        layout_pairs=layout_pairs,
        layouts=unless_all(4, None),
    )


def torch_world_of_four() -> World:
    """Horovod lets its processes agree on each collective every millisecond: with four on few cores that is slow."""
    return torch_world(layout_pairs=unless_all(5, 15))


def _tensor(value: Array, dtype: str) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape).to(getattr(torch, dtype))


def _array(x: Any) -> Array:
    values = x.detach()
    return np.asarray(values.float() if str(values.dtype) == "torch.bfloat16" else values)


def _vjp(function: Callable[[Any], Any], x: Any, y: Any) -> Any:
    import torch

    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(given), given, y)
    return gradient


def tensorflow_world(layout_pairs: int = 30) -> World:
    return World(
        backend=unidist.use("horovod", framework="tensorflow"),
        array=_eager,
        numpy=_eager_array,
        vjp=_eager_vjp,
        layout_pairs=layout_pairs,
        layouts=unless_all(4, None),
    )


def tensorflow_world_of_four() -> World:
    return tensorflow_world(layout_pairs=unless_all(2, 4))


def _eager(value: Array, dtype: str) -> Any:
    import tensorflow as tf

    return tf.cast(tf.constant(value), dtype)


def _eager_array(x: Any) -> Array:
    import tensorflow as tf

    return np.asarray(tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x)


def _eager_vjp(function: Callable[[Any], Any], x: Any, y: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        out = function(x)
    return tape.gradient(out, x, output_gradients=y, unconnected_gradients="zero")


class TestTwoProcesses(ConformanceSuite):
    backend = "horovod"
    world = f"{__name__}:torch_world"
    processes = 2
    left_out = unless_all(OF_FOUR, frozenset())
    preload = preloaded.TORCH


class TestFourProcesses(ConformanceSuite):
    backend = "horovod"
    world = f"{__name__}:torch_world_of_four"
    processes = 4
    preload = preloaded.TORCH
    timeout = 200.0


class TestTwoProcessesOfTensorFlow(ConformanceSuite):
    backend = "horovod"
    world = f"{__name__}:tensorflow_world"
    processes = 2
    left_out = unless_all(OF_FOUR, frozenset())
    preload = preloaded.KERAS["tensorflow"]
    env: ClassVar = ON_TENSORFLOW


class TestFourProcessesOfTensorFlow(ConformanceSuite):
    backend = "horovod"
    world = f"{__name__}:tensorflow_world_of_four"
    processes = 4
    preload = preloaded.KERAS["tensorflow"]
    env: ClassVar = ON_TENSORFLOW
    timeout = 200.0
