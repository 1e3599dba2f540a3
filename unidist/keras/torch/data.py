"""Batches: which rows belong to which data shard, and reading only those where the data can tell."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from unidist import events
from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.protocol import Array
from unidist.errors import DesyncError
from unidist.keras.consistency.agreement import Peers, stride
from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.batch_digest import Views
from unidist.keras.feed.lockstep import symbol_of
from unidist.keras.feed.row_sampler import Narrowed, tells_rows
from unidist.keras.patching.compat import TorchEpochIterator, TorchTrainer, get_device, tree
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import context, devices
from unidist.keras.torch.context import Rows
from unidist.keras.torch.cutting import (
    ENDED,
    RAISED,
    Cutting,
    LocalBatches,
    agreed_rows,
    bounds,
    cut,
    of_places,
    of_shards,
    row_count,
    rows_of,
)
from unidist.keras.torch.world import RankWorld, rank_world


def _agree_on_length(world: RankWorld, batches: int) -> None:
    """Raises DesyncError where data shards were given epochs of different lengths (0: not known ahead)."""
    found = of_shards(world, batches) if world.data_axes else [batches]
    if len(set(found)) > 1:
        told = [str(n) if n else "unknown" for n in found]
        raise DesyncError(
            f"auto_shard_dataset=False: an epoch has {', '.join(told)} batches on the data shards, in their order. "
            "Give every process as many batches, or pass steps_per_epoch, which each of them can give",
            ranks=world.mesh.devices,
            collective="batch sizes",
        )


class EpochReader:
    """Iterates over an epoch's global batches and yields this rank's rows of each.

    A DataLoader that puts rows of a map-style dataset together is asked for this rank's rows alone (NumPy arrays and
    tensors come as one); of any other source each batch is read and cut.
    """

    def __init__(
        self, source: Any, world: RankWorld, already_local: bool, given: Any = None, cutting: Cutting | None = None
    ) -> None:
        self.world = world
        self._cutting = cutting or Cutting(world)
        self.rank = world.ranks[0]
        self._read: list[Rows | None] = []  # of the batches since the last execution
        self._already_local = already_local
        self._narrowed: Narrowed | None = None
        several = processes(world)
        self._views = None if several is None else Views(given if given is not None else source, several)
        if not already_local:
            share_random_state(world)
            if tells_rows(source, given):
                self._narrowed = Narrowed(source, self._own, world.data_place(self.rank))
        self._source = source

    def _own(self, indices: list[int]) -> list[int]:
        """This rank's of a batch's rows."""
        if self._views is not None:
            self._views.check(np.asarray(indices))
        start, length = bounds(self.world, self.rank, len(indices))
        return indices[start : start + length]

    def __iter__(self) -> Iterator[Any]:
        # The source's iterator is made at once, as Keras makes it: it draws a seed when it is.
        if self._narrowed is not None:
            return self._own_rows(iter(self._narrowed))
        return self._own_batches(iter(self._source)) if self._already_local else self._batches(iter(self._source))

    def _own_batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """The batches of this process; all processes know of each, and when there are no more."""
        while True:
            try:
                batch = next(source, None)
                count = ENDED if batch is None else row_count(batch)
            except Exception:
                if self.world.data_axes:
                    of_shards(self.world, RAISED)
                raise
            rows = agreed_rows(self.world, count)
            if batch is None:
                return
            yield self._sent(batch, rows)

    def _own_rows(self, source: Iterator[tuple[Any, int]]) -> Iterator[Any]:
        for batch, total in source:
            rows = rows_of(self.world, self.rank, total)
            yield self._sent(cut(batch, 0, rows.local), rows)

    def _batches(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch in source if self._views is None else self._views.checked(source):
            total = self._cutting.total(batch)
            rows = None if total is None else rows_of(self.world, self.rank, total)
            own = (0, None) if total is None else bounds(self.world, self.rank, total)
            yield self._sent(cut(batch, *own), rows)

    @property
    def rows(self) -> Rows | None:
        """Gives the rows that were read last; None: of no batch yet, or the batch is not cut."""
        return self._read[-1] if self._read else None

    def of_execution(self, batches: list[Any]) -> list[Any]:
        """Returns what was read last, as it goes to a step: with its rows, where it is this rank's."""
        read, self._read = self._read[-len(batches) :], []
        return LocalBatches(batches, read) if any(read) else batches

    def _sent(self, batch: Any, rows: Rows | None) -> Any:
        self._read.append(rows)
        device = torch.device(get_device())
        return tree.map_structure(lambda x: devices.sent(x, device) if isinstance(x, torch.Tensor) else x, batch)


def share_random_state(world: RankWorld) -> None:
    """The first process's random state on every process: seeds and shuffles agree."""
    if (several := processes(world)) is not None:
        several.align_seeds()


@functools.lru_cache(maxsize=64)
def processes(world: RankWorld) -> Processes | None:
    """Returns the processes that train a model together, in their order and not the mesh's, if several.

    One that a mesh leaves alone writes by itself: the others need not come.
    """
    if world.is_virtual or world.mesh.size == 1:
        return None
    ranks = tuple(sorted(world.mesh.devices))
    line = rank_world(Mesh({"process": len(ranks)}, ranks), ())

    def of_first(array: Array, purpose: str) -> Array:
        whole = Sharding(line.mesh, Layout(), array.shape)
        with events.for_purpose(purpose):
            found: Array = line.backend.broadcast(torch.tensor(array), whole, line.mesh.axis_names, 0).numpy()
        return found

    def of_all(number: int, purpose: str) -> tuple[int, ...]:
        return tuple(of_places(line, line.mesh.axis_names, number, purpose))

    return Processes(ranks.index(world.ranks[0]), tuple((rank,) for rank in ranks), of_first, of_all)


def peers(world: RankWorld) -> Peers | None:
    """The processes of a world, if there are several."""
    rank = world.ranks[0]

    def replica(variable: Any) -> Array | None:
        storage = getattr(variable, "_storage", None)
        # Where states are cut, the parts of a whole value come together when it is next used.
        if (
            storage is None
            or storage.shardings.stored.layout.dims
            or storage.shardings.state != storage.shardings.stored
        ):
            return None
        flat = storage.shards[rank].detach().reshape(-1)
        sample = flat[:: stride(flat.numel())].cpu()
        found: Array = (sample.float() if sample.dtype == torch.bfloat16 else sample).numpy()
        return found

    several = processes(world)
    return None if several is None else Peers(several, replica)


def hooks() -> tuple[Hook, ...]:
    """Inside a session of several processes TorchEpochIterator reads this rank's rows."""
    why = "each rank reads its rows"
    return (
        Hook(TorchTrainer, "_symbolic_build", _building, "losses and metrics are built for all rows"),
        Hook(TorchEpochIterator, "_get_iterator", _reading, why),
        Hook(TorchEpochIterator, "__next__", _stepping, why),
    )


@calling
def _reading(original: Any, self: Any) -> Any:
    source = original(self)
    engine = context.engine_at_work.get()
    if engine is None or engine.world.is_virtual:
        return source
    already_local = not engine.distribution.strategy.auto_shard_dataset
    if already_local:
        _agree_on_length(engine.world, self.steps_per_epoch or self._num_batches or 0)
    self._unidist_reader = EpochReader(source, engine.world, already_local, self.data_adapter, engine.cutting)
    return self._unidist_reader


@calling
def _stepping(original: Any, self: Any) -> Any:
    begin, end, batches = original(self)
    reader = getattr(self, "_unidist_reader", None)
    return begin, end, batches if reader is None else reader.of_execution(batches)


@calling
def _building(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
    """Gives what Keras traces losses and metrics with as many rows as all ranks have together."""
    steps = None if iterator is None else ((*ends, _as_whole(batches)) for *ends, batches in iterator)
    return original(self, steps, data_batch)


def _as_whole(batches: Any) -> Any:
    def whole(batch: Any, rows: Rows | None) -> Any:
        total = None if rows is None else rows.total
        return tree.map_structure(lambda x: x if total is None or not np.ndim(x) else symbol_of(x, total), batch)

    if not isinstance(batches, LocalBatches):
        return batches
    return [whole(batch, rows) for batch, rows in zip(batches, batches.rows, strict=True)]
