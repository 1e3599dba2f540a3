"""Says which variables are gathered together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist.algebra import Axes
from unidist.keras.torch.params.flat_buffer import Cut, cut_between
from unidist.keras.torch.params.storage import Storage


@dataclass(slots=True)
class Members:
    """The members of a unit that will be.

    Attributes:
        axes: over which they are gathered.
        low: the dtype of computation, where the values are expected to be read in it.
        nbytes: that will be gathered.
    """

    axes: Axes
    low: torch.dtype | None
    cuts: list[Cut] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    nbytes: int = 0

    def add(self, storage: Storage, cut: Cut, leaf: torch.Tensor) -> None:
        self.cuts.append(cut)
        self.storages.append(storage)
        self.nbytes += leaf.numel() * (self.low or leaf.dtype).itemsize


def grouped(
    layers: Iterable[list[Storage]], rank: int, lows: Mapping[int, torch.dtype], most: int, most_kept: int
) -> list[Members]:
    """Units of whole layers; small neighbours share one. Each is of one dtype, one group and one kind.

    Args:
        layers: the storages of each, in the order of the model.
        lows: id of a storage -> the dtype in which its layer is expected to read it, where that is not its own.
        most, most_kept: bytes from which on a unit takes no further layer; of those that are stored whole.
    """
    units: list[Members] = []
    open_units: dict[Any, Members] = {}
    for storages in layers:
        touched = set()
        for storage in storages:
            found = cut_between(
                storage.sharding, storage.shardings.state if storage.is_kept else storage.shardings.stored, rank
            )
            if found is None:
                continue
            axes, cut = found
            low = None if storage.is_kept else lows.get(id(storage))
            key = (axes, storage.shards[rank].dtype, storage.is_kept, low)
            if key not in open_units:
                open_units[key] = Members(axes, low)
                units.append(open_units[key])
            open_units[key].add(storage, cut, storage.leaves[rank])
            touched.add(key)
        for key in touched:
            if open_units[key].nbytes >= (most_kept if key[2] else most):
                del open_units[key]
    return units
