"""Variables on torch as checkpoints see them: each rank's shard, written and read where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from unidist import events
from unidist.algebra import Sharding
from unidist.algebra.sharding import Region
from unidist.backends.protocol import Array
from unidist.checkpoint.regions import whole
from unidist.checkpoint.shares import Share
from unidist.keras.checkpoint.held import Held, Read
from unidist.keras.consistency.processes import Processes
from unidist.keras.torch import data, engine
from unidist.keras.torch.params.placing import is_placed
from unidist.keras.torch.params.storage import Storage

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ready(model: Any) -> None:
    """Places a built model, its optimizer and its metrics, if it is distributed.

    Nothing is under way then, and gradients that wait for an accumulation are in the slots.
    """
    found = engine.engine_of(model)
    if found is not None:
        with found.session():
            found.prepare()


def processes(model: Any) -> Processes | None:
    """Returns the processes that hold the model together, if there are several."""
    world = engine.world_of_model(model)
    return None if world is None else data.processes(world)


def held(variable: Any) -> Held:
    """A variable, as the ranks of this process hold it."""
    if not is_placed(variable):
        return OnTorch(variable, None, {0: variable.value})
    storage = variable._storage
    if storage.shardings.stored.layout.partial:
        return Summed(variable, storage)
    return Stored(variable, storage)


class OnTorch(Held):
    """Tensors of one variable, one for each rank of this process."""

    def __init__(self, variable: Any, sharding: Sharding | None, tensors: dict[int, torch.Tensor]) -> None:
        self.variable = variable
        self.shape = tuple(int(n) for n in variable.shape)
        self.dtype = str(variable.dtype)
        self.sharding = sharding
        self._tensors = tensors

    def part(self, rank: int) -> Array:
        return _words(self._tensors[rank])

    def put(self, read: Read) -> None:
        came: dict[Region, torch.Tensor] = {}
        for rank, tensor in self._tensors.items():
            region = whole(self.shape) if self.sharding is None else self.sharding.region(rank)
            if region in came:
                tensor.detach().copy_(came[region])
            else:
                _fill(tensor.detach(), region, read)
                came[region] = tensor.detach()


class Stored(OnTorch):
    """A variable whose ranks store shards, or replicas."""

    def __init__(self, variable: Any, storage: Storage) -> None:
        tensors: dict[int, torch.Tensor] = {rank: storage.settled(rank) for rank in storage.world.ranks}
        super().__init__(variable, storage.shardings.stored, tensors)
        self._storage = storage

    def exchanged(self, share: Share) -> Iterator[tuple[int, Array]]:
        world, stored = self._storage.world, self._storage.shardings.stored
        (rank,) = world.ranks
        start = stored.region(rank)[share.dim][0]
        for piece in share.pieces():
            own = self._tensors[rank].detach().narrow(share.dim, piece.start - start, piece.stop - piece.start)
            source, target = share.exchange(stored.mesh, piece.stop - piece.start)
            with torch.no_grad(), events.for_purpose(f"saving {self.variable.path}"):
                rows = world.backend.redistribute(own.contiguous(), source, target)
            yield piece.start + target.region(rank)[share.dim][0], _words(rows)

    def put(self, read: Read) -> None:
        super().put(read)
        self._storage.follow_shards()


class Summed(OnTorch):
    """A variable whose value is a sum over ranks: a metric's state. It is written as the sum."""

    def __init__(self, variable: Any, storage: Storage) -> None:
        super().__init__(variable, None, {})
        self._storage = storage

    def fetch(self) -> None:
        self._tensors = {0: self._storage.whole(None).detach()}

    def put(self, read: Read) -> None:
        value = torch.empty(self.shape, dtype=next(iter(self._storage.shards.values())).dtype)
        _fill(value, whole(self.shape), read)
        self._storage.assign(value)


def _words(tensor: torch.Tensor) -> Array:
    host = tensor.detach().cpu().contiguous()
    found: Array = host.view(_INTEGERS[host.element_size()]).numpy()
    return found.view(f"u{host.element_size()}")


def _fill(tensor: torch.Tensor, region: Region, read: Read) -> None:
    """Reads a region into a tensor of its shape."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        read(region, _words(tensor))
        return
    found = read(region, None)
    host = torch.from_numpy(found.view(f"i{found.itemsize}" if found.itemsize > 1 else np.uint8))
    tensor.copy_(host.view(tensor.dtype))
