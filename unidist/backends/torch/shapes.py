"""Shapes and parts of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from unidist.algebra import chunk
from unidist.algebra.layout import ReduceOp
from unidist.backends.torch.primitives import W, W_contra


def resized(x: torch.Tensor, sizes: Mapping[int, int]) -> list[int]:
    """The shape of x with other sizes along some dims."""
    return [sizes.get(dim, n) for dim, n in enumerate(x.shape)]


def cuts(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """x in parts of those lengths along a dim: views."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x.narrow(dim, start, size))
        start += size
    return parts


class Parted(Protocol[W_contra]):
    """The collectives that it is made of."""

    def reduce_scatter(
        self, x: torch.Tensor, transport: W_contra, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor, transport: W_contra, dim: int, sizes: Sequence[int]) -> torch.Tensor: ...


def all_reduce_in_parts(x: torch.Tensor, ways: Parted[W], transport: W, op: ReduceOp) -> torch.Tensor:
    """Reduces one part of all at each place, then joins them.

    Sends 2(n-1)/n of x, as a ring's all_reduce does.
    """
    flat = x.reshape(-1)
    sizes = [length for _, length in chunk(flat.numel(), transport.size)]
    own = ways.reduce_scatter(flat, transport, 0, sizes, op)
    return ways.all_gather(own, transport, 0, sizes).view(x.shape)
