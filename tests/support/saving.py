"""What torch keeps of a call for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside give and use: `most` is what lives at most at once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, key)
            self.most = max(self.most, self.now)

    @property
    def now(self) -> int:
        return sum(self._sizes.values())
