"""Shapes and parts of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


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
