"""Fetches values that backward needs again, by torch's hooks on saved tensors, where it lets them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from unidist.keras.torch.params.param_groups import Fetcher


def alias(saved: torch.Tensor) -> torch.Tensor:
    # The tensor itself would hold the graph that holds it.
    return saved.detach()


@contextlib.contextmanager
def besides(fetcher: Fetcher) -> Iterator[None]:
    """Keeps fetched values by the fetcher, inside of hooks that keep what backward needs otherwise.

    Another way would open them without fetching them.
    """
    other: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if other is None:
        yield
        return
    keep, give = other

    def pack(saved: torch.Tensor) -> tuple[bool, Any]:
        ours = saved.untyped_storage()._cdata in fetcher.by_memory
        return ours, alias(saved) if ours else keep(saved)

    def unpack(packed: tuple[bool, Any]) -> torch.Tensor:
        ours, kept = packed
        return fetcher.opened(kept) if ours else give(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextlib.contextmanager
def without(fetcher: Fetcher) -> Iterator[None]:
    """Takes the hooks off inside, where torch takes none, as in torch.func's derivatives.

    What has been fetched stays until the step's end.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[1] != fetcher.opened:
        yield
        return
    for unit in fetcher.fetched:
        unit.is_pinned |= unit.is_here
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
