"""Batches: which rows belong to which data shard, and reading only those where the data can tell."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.backends.protocol import Array
from unidist.errors import DesyncError, LayoutError
from unidist.keras.agreement import Peers, stride
from unidist.keras.compat import TorchEpochIterator, TorchTrainer, get_device, tree
from unidist.keras.interception import Hook
from unidist.keras.lockstep import symbol_of
from unidist.keras.narrowing import Narrowed, tells_rows
from unidist.keras.processes import Processes
from unidist.keras.torch import context, devices
from unidist.keras.torch.context import Rows
from unidist.keras.torch.world import RankWorld, rank_world
from unidist.keras.views import Views


class LocalBatches(list[Any]):
    """What an epoch iterator hands to a step: one batch that holds this rank's rows alone, and how many there are."""

    def __init__(self, batches: list[Any], rows: Rows) -> None:
        super().__init__(batches)
        self.rows = rows


@dataclass(frozen=True)
class Shards:
    """A batch, and the rows of it that each rank has.

    Attributes:
        batch: all rows, or those of this process alone.
        rows: how many this process has, where the batch holds these alone.
        total: of the global batch.
    """

    world: RankWorld
    batch: Any
    rows: Rows | None
    total: int

    @staticmethod
    def of(world: RankWorld, batches: list[Any], *, auto_shard: bool) -> Shards:
        """`batches`: what an epoch iterator hands to a step; `auto_shard`: each process was given all rows."""
        batch, rows = batches[0], None
        if isinstance(batches, LocalBatches):
            rows = batches.rows
        elif not world.is_virtual and not auto_shard:
            rows = rows_already_local(world, batch)
        return Shards(world, batch, rows, row_count(batch) if rows is None else rows.total)

    def on(self, rank: int) -> tuple[Rows, Any]:
        if self.rows is not None:
            return self.rows, self.batch
        own = cut(self.batch, *bounds(self.world, rank, self.total), copy=self.world.is_virtual)
        return rows_of(self.world, rank, self.total), own


def row_count(batch: Any) -> int:
    """Rows of a batch. Raises LayoutError where its arrays disagree or have none."""
    counts = {int(leaf.shape[0]) for leaf in tree.flatten(batch) if hasattr(leaf, "shape") and len(leaf.shape)}
    if len(counts) != 1:
        raise LayoutError(f"a batch must have one number of rows to be cut over devices, found {sorted(counts)}")
    return counts.pop()


def bounds(world: RankWorld, rank: int, total: int) -> tuple[int, int]:
    """(start, length) of a rank's rows in a batch of `total`: torch.chunk's sizes, like every dim in unidist."""
    if not world.data_axes:
        return 0, total
    return world.batch_sharding((total,)).region(rank)[0]


def rows_of(world: RankWorld, rank: int, total: int) -> Rows:
    shards = world.mesh.axis_size(world.data_axes) if world.data_axes else 1
    # As torch.chunk cuts.
    least = max(0, total - (shards - 1) * -(-total // shards))
    return Rows(bounds(world, rank, total)[1], total, total % shards == 0, least)


def cut(batch: Any, start: int, length: int, *, copy: bool = False) -> Any:
    """The rows [start, start + length) of every array of a batch; copied where ranks share this process, because
    Keras multiplies masks into sample weights in place."""

    def part(x: Any) -> Any:
        if x is None or not hasattr(x, "shape") or not len(x.shape):
            return x
        rows = x[start : start + length]
        if not copy:
            return rows
        return rows.clone() if isinstance(rows, torch.Tensor) else rows.copy()

    return tree.map_structure(part, batch)


def rows_already_local(world: RankWorld, batch: Any) -> Rows:
    """Rows where every process was given its own part (auto_shard_dataset=False): counted by a collective."""
    local = row_count(batch)
    return _agreed_rows(world, local)


def _agreed_rows(world: RankWorld, local: int) -> Rows:
    if not world.data_axes:
        return Rows(local, local, True, local)
    found = _of_shards(world, local)
    if min(found) < 0:
        _tell_apart(world, found)
    return Rows(local, sum(found), len(set(found)) == 1, min(found))


def _of_shards(world: RankWorld, number: int) -> list[int]:
    """Every data shard's number, in order. A collective."""
    return _of_places(world, world.data_axes, number, "batch sizes")


def _of_places(world: RankWorld, axes: Axes, number: int, purpose: str) -> list[int]:
    """The number of every place along the axes, in order. A collective."""
    cut = Sharding(world.mesh, Layout(axes), (world.mesh.axis_size(axes),))
    with events.for_purpose(purpose):
        found = world.backend.redistribute(torch.tensor([number]), cut, cut.with_layout(Layout()))
    return [int(n) for n in found]


# In place of a number of rows: this shard's data has no more, or raised.
_ENDED, _RAISED = -1, -2


def _tell_apart(world: RankWorld, found: list[int]) -> None:
    """Raises DesyncError unless the data of all shards has ended together."""
    if set(found) == {_ENDED}:
        return
    how = "raised an error" if _RAISED in found else "ended, while others have more batches"
    apart = [place for place, n in enumerate(found) if n == (_RAISED if _RAISED in found else _ENDED)]
    raise DesyncError(
        f"auto_shard_dataset=False: the data of data shards {apart} of {len(found)} {how}. Give every process as many "
        "batches, or pass steps_per_epoch, which each of them can give",
        ranks=tuple(r for r in world.mesh.devices if world.data_place(r) in apart),
        collective="batch sizes",
    )


def _agree_on_length(world: RankWorld, batches: int) -> None:
    """Raises DesyncError where data shards were given epochs of different lengths (0: not known ahead)."""
    found = _of_shards(world, batches) if world.data_axes else [batches]
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

    def __init__(self, source: Any, world: RankWorld, already_local: bool, given: Any = None) -> None:
        self.world = world
        self.rank = world.ranks[0]
        self.rows: Rows | None = None
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
                count = _ENDED if batch is None else row_count(batch)
            except Exception:
                if self.world.data_axes:
                    _of_shards(self.world, _RAISED)
                raise
            rows = _agreed_rows(self.world, count)
            if batch is None:
                return
            self.rows = rows
            yield self._sent(batch)

    def _own_rows(self, source: Iterator[tuple[Any, int]]) -> Iterator[Any]:
        for batch, total in source:
            self.rows = rows_of(self.world, self.rank, total)
            yield self._sent(cut(batch, 0, self.rows.local))

    def _batches(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch in source:
            if self._views is not None:
                self._views.check(batch)
            total = row_count(batch)
            self.rows = rows_of(self.world, self.rank, total)
            yield self._sent(cut(batch, *bounds(self.world, self.rank, total)))

    def _sent(self, batch: Any) -> Any:
        device = torch.device(get_device())
        return tree.map_structure(lambda x: devices.sent(x, device) if isinstance(x, torch.Tensor) else x, batch)


def share_random_state(world: RankWorld) -> None:
    """The first process's random state on every process: seeds and shuffles agree."""
    if (several := processes(world)) is not None:
        several.align_seeds()


def check_alike(world: RankWorld, number: int, what: str) -> None:
    """
    Raises:
        DesyncError: the data shards' numbers differ.
    """
    found = _of_shards(world, number)
    if len(set(found)) > 1:
        raise DesyncError(
            f"{what} differ between the processes. Draw from a keras.random.SeedGenerator that the model has, and give "
            "random rows as data"
        )


@functools.lru_cache(maxsize=64)
def processes(world: RankWorld) -> Processes | None:
    """Those that train a model together, in their order and not the mesh's, if there are several. One that a mesh
    leaves alone writes by itself: the others need not come."""
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
        return tuple(_of_places(line, line.mesh.axis_names, number, purpose))

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


def _reading(original: Any) -> Any:
    @functools.wraps(original)
    def _get_iterator(self: Any) -> Any:
        source = original(self)
        engine = context.engine_at_work.get()
        if engine is None or engine.world.is_virtual:
            return source
        already_local = not engine.distribution.strategy.auto_shard_dataset
        if already_local:
            _agree_on_length(engine.world, self.steps_per_epoch or self._num_batches or 0)
        self._unidist_reader = EpochReader(source, engine.world, already_local, self.data_adapter)
        return self._unidist_reader

    return _get_iterator


def _stepping(original: Any) -> Any:
    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807 (Python's name)
        begin, end, batches = original(self)
        reader = getattr(self, "_unidist_reader", None)
        return begin, end, batches if reader is None or reader.rows is None else LocalBatches(batches, reader.rows)

    return __next__


def _building(original: Any) -> Any:
    """What Keras traces losses and metrics with has as many rows as all ranks have together."""

    @functools.wraps(original)
    def _symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        steps = None if iterator is None else ((*ends, _as_whole(batches)) for *ends, batches in iterator)
        return original(self, steps, data_batch)

    return _symbolic_build


def _as_whole(batches: Any) -> Any:
    def whole(x: Any) -> Any:
        return symbol_of(x, batches.rows.total) if len(getattr(x, "shape", ())) else x

    return [tree.map_structure(whole, batch) for batch in batches] if isinstance(batches, LocalBatches) else batches
