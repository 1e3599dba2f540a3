"""Copies what layers give of fetched weights: these are let go behind the layer.

A table of positions is given as it is, as a view of the table.
"""

from __future__ import annotations

from typing import Any

import torch

from unidist.keras.patching.compat import get_keras_mask, set_keras_mask, tree
from unidist.keras.torch import transforms
from unidist.keras.torch.context import Frame

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def owned(frame: Frame, given: Any) -> Any:
    """Returns what a layer gives, in memory that is not let go."""
    fetcher = frame.fetcher
    if fetcher is None or transforms.are_at_work():
        return given

    def own(x: Any) -> Any:
        return _copy(x) if type(x) in _PLAIN and x.untyped_storage()._cdata in fetcher.by_memory else x

    return tree.map_structure(own, given)


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy that repeats in memory no more than the tensor does."""
    once = x
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    copied = once.clone().expand(x.shape)
    if (mask := get_keras_mask(x)) is not None:
        set_keras_mask(copied, mask)
    return copied
