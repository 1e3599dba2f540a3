"""Counts what a call on tensors without values keeps for backward, each memory once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from unidist.backends.torch.sharded import ShardedTensor
from unidist.backends.torch.sharded.masks import Masks


class Kept:
    """Counts the tensors that torch keeps of a call, of one rank.

    Args:
        weights: they are there anyway, and do not count.

    Attributes:
        bytes: of all that was kept so far.
        masks: to be those of the space in which sequences are cut.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.bytes = 0
        self.masks: Masks = _MasksWithoutValues(self)
        # The memory itself: an address is another's as soon as its own is gone.
        self._known = {_address(x): x.untyped_storage() for x in weights}

    def watching(self) -> AbstractContextManager[Any]:
        """Inside, what is kept is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda x: x)

    def note(self, x: torch.Tensor) -> torch.Tensor:
        if _address(x) not in self._known:
            self._known[_address(x)] = x.untyped_storage()
            self.bytes += x.untyped_storage().nbytes()
        return x


class _MasksWithoutValues(Masks):
    """Counts what attention keeps where it is one operation, as on devices that have values.

    Without values torch computes it step by step, and keeps a number for each pair of places. Masks of one shape are
    taken for one mask, of two values.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept
        self._seen: set[torch.Size] = set()

    def keeping(self, mask: torch.Tensor | None, *operands: torch.Tensor) -> AbstractContextManager[Any]:
        if mask is not None and mask.requires_grad:
            return contextlib.nullcontext()
        queries, keys, values = map(_part, operands)
        for x in (queries, keys, values):
            self._kept.note(x)
        # What it gives, and the logarithm of each sum, in float32.
        rows = queries.numel() // queries.shape[-1]
        self._kept.bytes += rows * (values.shape[-1] * values.itemsize + 4)
        if mask is not None and (shape := _part(mask).shape) not in self._seen:
            self._seen.add(shape)
            self._kept.bytes += shape.numel()
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _part(x: torch.Tensor) -> torch.Tensor:
    while isinstance(x, ShardedTensor):
        x = x.local
    return x


def _address(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
