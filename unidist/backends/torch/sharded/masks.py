"""Keeps attention's masks for backward: a byte for each pair of places, and equal masks once.

Where heads are cut, each rank needs the whole mask of each layer, and torch keeps it as numbers. A part of all else is
less than that one tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class _Bits(NamedTuple):
    """A mask of two values."""

    is_high: Tensor
    high: Tensor
    low: Tensor

    def values(self) -> Tensor:
        return torch.where(self.is_high, self.high, self.low)


class Masks:
    """The masks of a space's attention. The last one is known, as long as somebody keeps it."""

    def __init__(self) -> None:
        self._last: Callable[[], Tensor | None] = lambda: None

    def keeping(self, mask: Tensor | None, *operands: Tensor) -> AbstractContextManager[Any]:
        """Inside, what torch keeps of a mask without a gradient is its bits.

        Args:
            operands: the attention's queries, keys and values.
        """
        if mask is None or mask.requires_grad or mask.is_meta or (bits := self._bits(mask)) is None:
            return contextlib.nullcontext()
        # Not the mask itself: what is kept holds these.
        place, shape = mask.untyped_storage().data_ptr(), mask.shape

        def pack(x: Tensor) -> Any:
            is_mask = x.untyped_storage().data_ptr() == place and x.shape == shape
            return bits if is_mask else x

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpacked)

    def _bits(self, mask: Tensor) -> _Bits | None:
        """None where it has other values too."""
        if not mask.is_floating_point() or not mask.numel():
            return None
        low, high = torch.aminmax(mask)
        found = _Bits(mask == high, high, low)
        if not torch.equal(found.values(), mask):
            return None
        last = self._last()
        if last is not None and last.shape == mask.shape and torch.equal(last, found.is_high):
            return found._replace(is_high=last)
        self._last = weakref.ref(found.is_high)
        return found


def _unpacked(x: Any) -> Tensor:
    return x.values() if isinstance(x, _Bits) else x
