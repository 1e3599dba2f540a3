"""The torch backend obeys the laws, with two and with four real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from unidist.backends.protocol import Array
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World


def world(layout_pairs: int = unless_all(30, 60)) -> World:
    """Called in each process, under torchrun's environment."""
    return World(
        backend=unidist.use("torch"),
        array=_tensor,
        numpy=_array,
        vjp=_vjp,
        layout_pairs=layout_pairs,
        layouts=unless_all(8, None),
    )


def world_of_four() -> World:
    return world(unless_all(10, 60))


def _tensor(value: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape).to(getattr(torch, dtype))


def _array(x: torch.Tensor) -> Array:
    values = x.detach()
    return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)


def _vjp(function: Callable[[Any], Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(given), given, y)
    return gradient


class TestTwoProcesses(ConformanceSuite):
    backend = "torch"
    world = f"{__name__}:world"
    processes = 2
    preload = preloaded.TORCH


class TestFourProcesses(ConformanceSuite):
    backend = "torch"
    world = f"{__name__}:world_of_four"
    processes = 4
    preload = preloaded.TORCH
    timeout = 200.0
