"""Norms of whole tensors from the parts that ranks have; and the variables that are placed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from unidist import events
from unidist.algebra import Layout, Sharding

if TYPE_CHECKING:
    from unidist.algebra.layout import ReduceOp
    from unidist.keras.torch.params.storage import Storage

placed: weakref.WeakSet[Storage] = weakref.WeakSet()
_INF = float("inf")


def watch(storage: Storage) -> None:
    """To be called for each variable that is placed."""
    placed.add(storage)


def of_parts(cut: Sequence[tuple[torch.Tensor, Storage]], p: float) -> Iterator[torch.Tensor]:
    """The norm of each whole gradient; this rank has a part of it."""
    op: ReduceOp = "max" if p == _INF else "min" if p == -_INF else "sum"
    came = of_wholes([_summand(grad, p) for grad, _ in cut], [storage for _, storage in cut], op)
    yield from (came if op != "sum" or p == 0 else (one ** (1 / p) for one in came))


def of_wholes(numbers: Sequence[torch.Tensor], storages: Sequence[Storage], op: ReduceOp) -> list[torch.Tensor]:
    """Returns a number of each whole gradient; this rank has that of its part.

    A collective for each way in which some are cut.

    Args:
        numbers: of no dims and one dtype.
        storages: of their variables.
        op: what makes that of the whole of those of the parts.
    """
    found = list(numbers)
    groups: dict[tuple[str, ...], list[int]] = {}
    for k, storage in enumerate(storages):
        if axes := storage.shardings.state.layout.sharded_axes:
            groups.setdefault(tuple(sorted(axes)), []).append(k)
    for axes, members in groups.items():
        world = storages[members[0]].world
        stacked = torch.stack([found[k] for k in members])
        partial = Sharding(world.mesh, Layout(partial=dict.fromkeys(axes, op)), tuple(stacked.shape))
        with events.for_purpose("gradient norm"):
            whole = world.backend.redistribute(stacked, partial, partial.with_layout(Layout()))
        for k, value in zip(members, whole.unbind(), strict=True):
            found[k] = value
    return found


def _summand(grad: torch.Tensor, p: float) -> torch.Tensor:
    """Returns what is summed over the parts of a gradient, or of what the largest or smallest counts."""
    if not grad.numel():
        return grad.new_tensor(_INF if p == -_INF else 0.0)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, p)
    return norm if abs(p) == _INF or p == 0 else norm.pow(p)
