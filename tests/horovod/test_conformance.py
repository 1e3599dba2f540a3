"""The horovod backend obeys the laws over torch and over TensorFlow, with two and with four real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from unidist.backends.protocol import Array
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World


def torch_world(layout_pairs: int = 60) -> World:
    """Called in each process, under a launcher's environment: process 0 serves Horovod's rendezvous."""
    return World(backend=unidist.use("horovod"), array=_tensor, numpy=_array, vjp=_vjp, layout_pairs=layout_pairs)


def torch_world_of_four() -> World:
    """Horovod lets its processes agree on each collective every millisecond: with four on few cores that is slow."""
    return torch_world(layout_pairs=15)


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


class TestTwoProcesses(ConformanceSuite):
    backend = "horovod"
    world = f"{__name__}:torch_world"
    processes = 2


class TestFourProcesses(ConformanceSuite):
    backend = "horovod"
    world = f"{__name__}:torch_world_of_four"
    processes = 4
    timeout = 200.0
