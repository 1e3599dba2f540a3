"""Moving activations between layouts, on the rank at work."""

from __future__ import annotations

import functools
from typing import Any

import torch

from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.backends.torch.sharded import ShardedTensor, wrap
from unidist.keras.torch.context import Frame

WHOLE = Layout()


def move(frame: Frame, x: torch.Tensor, shape: tuple[int, ...], src: Layout, dst: Layout) -> torch.Tensor:
    """Moves a tensor of the global `shape` from one layout to another; its gradient goes the other way.

    Of one that carries rows, this rank's rows are moved.
    """
    if type(x) is ShardedTensor:
        sizes = (n if m == whole else m for m, whole, n in zip(shape, x.shape, x.local.shape, strict=True))
        out = move(frame, x.local, tuple(sizes), src, dst)
        return wrap(out, x.spec.space.spec_of(x.spec.states, out.shape))
    # A size that a tracer holds open is fixed here: a move is made for one shape.
    # torch.compile warns of caches, and goes past them.
    find = _ends if torch.compiler.is_compiling() else _known_ends
    ends = find(frame.world.mesh, tuple(map(int, shape)), src, dst)
    return frame.world.backend.redistribute(x, *ends)


def _ends(mesh: Mesh, shape: tuple[int, ...], src: Layout, dst: Layout) -> tuple[Sharding, Sharding]:
    sharding = Sharding(mesh, src, shape)
    return sharding, sharding.with_layout(dst)


_known_ends = functools.lru_cache(maxsize=4096)(_ends)


@functools.cache
def fanned(axes: Axes) -> Layout:
    """The layout that is fanned out over `axes`."""
    return Layout(fanout=axes)


@functools.cache
def partial(axes: Axes) -> Layout:
    """The layout that is to be summed over `axes`."""
    return Layout(partial=axes)


@functools.cache
def cut_dim(ndim: int, dim: int, axes: Axes) -> Layout:
    """The layout with `axes` on one dim."""
    dim %= ndim
    return Layout(*[None] * dim, axes)


def rows_from(x: Any, start: int, length: int | None) -> Any:
    """Returns the rows [start, start + length) of an array or a tensor; with no length all of them.

    It takes sparse ones too, which torch does not slice.
    """
    if length is None:
        return x
    if not isinstance(x, torch.Tensor) or x.layout is torch.strided:
        return x[start : start + length]
    return x.to_sparse_coo().narrow_copy(0, start, length).to_sparse(layout=x.layout)
