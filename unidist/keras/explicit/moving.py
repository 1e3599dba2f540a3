"""Moving activations between layouts, on the rank at work."""

from __future__ import annotations

import functools

import torch

from unidist.algebra import Axes, Layout, Sharding
from unidist.keras.explicit.context import Frame


def move(frame: Frame, x: torch.Tensor, shape: tuple[int, ...], src: Layout, dst: Layout) -> torch.Tensor:
    """A tensor of the global `shape` from one layout to another; its gradient goes the other way."""
    sharding = Sharding(frame.world.mesh, src, shape)
    return frame.world.backend.redistribute(x, sharding, sharding.with_layout(dst))


@functools.cache
def cut_dim(ndim: int, dim: int, axes: Axes) -> Layout:
    """The layout with `axes` on one dim."""
    dim %= ndim
    return Layout(*[None] * dim, axes)
