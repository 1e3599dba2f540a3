"""What torch keeps of a call for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def saved_bytes(call: Callable[[], Any], weights: Iterable[torch.Tensor]) -> tuple[Any, int]:
    """What a call gives, and the bytes of the tensors that it keeps: without weights, shared memory counted once."""
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call()
    return out, sum(found.values())
