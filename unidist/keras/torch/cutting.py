"""Batches and their rows: which of them a rank has, and batches that have no rows to cut by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unidist import events
from unidist.algebra import Axes, Layout, Sharding, chunk
from unidist.errors import DesyncError, LayoutError
from unidist.keras.records import layer_report
from unidist.keras.torch.activation_redistribute import rows_from
from unidist.keras.torch.context import Rows
from unidist.keras.torch.structures import of_batch
from unidist.keras.torch.world import RankWorld
from unidist.propagation.layouts import chunked

# In place of a number of rows: this shard's data has no more, or raised.
ENDED, RAISED = -1, -2


class LocalBatches(list[Any]):
    """Holds what an epoch iterator hands over: batches of this rank's rows alone, and how many each has."""

    def __init__(self, batches: list[Any], rows: list[Rows | None]) -> None:
        super().__init__(batches)
        self.rows = rows


def one_by_one(batches: list[Any]) -> list[list[Any]]:
    """Returns each batch of an execution, as an epoch iterator would hand it over alone."""
    if not isinstance(batches, LocalBatches):
        return [[batch] for batch in batches]
    return [LocalBatches([batch], [rows]) for batch, rows in zip(batches, batches.rows, strict=True)]


@dataclass(frozen=True)
class Shards:
    """A batch, and the rows of it that each rank has.

    Attributes:
        batch: all rows, or those of this process alone.
        rows: how many this process has, where the batch holds these alone.
        total: of the global batch; None: the batch is not cut, and each rank has all of it.
    """

    world: RankWorld
    batch: Any
    rows: Rows | None
    total: int | None

    @staticmethod
    def of(world: RankWorld, batches: list[Any], *, auto_shard: bool, by: Cutting) -> Shards:
        """`batches`: what an epoch iterator hands to a step; `auto_shard`: each process was given all rows."""
        batch, rows = batches[0], None
        if isinstance(batches, LocalBatches):
            (rows,) = batches.rows
        elif not world.is_virtual and not auto_shard:
            rows = rows_already_local(world, batch)
        return Shards(world, batch, rows, by.total(batch) if rows is None else rows.total)

    def on(self, rank: int) -> tuple[Rows | None, Any]:
        """A rank's rows, and how many; None: it has the whole batch."""
        if self.rows is not None:
            return self.rows, self.batch
        if self.total is None:
            return None, cut(self.batch, 0, None, copy=self.world.is_virtual)
        own = cut(self.batch, *bounds(self.world, rank, self.total), copy=self.world.is_virtual)
        return rows_of(self.world, rank, self.total), own


class Cutting:
    """Decides whether a model's batches are cut over the data shards.

    Tensors with different numbers of rows, as nodes, edges and graphs, have no rows to cut by: each rank computes the
    whole batch. So it does with all later ones: some of them may have as many nodes as edges.
    """

    def __init__(self, world: RankWorld, apart: bool = False) -> None:
        """`apart`: each tensor of such a batch is cut by its own rows later (carrying.py)."""
        self._apart = apart
        self._shards = world.data_shards
        self.is_off = False

    def total(self, batch: Any) -> int | None:
        """Rows of a batch that is cut; None of one that is not."""
        counts = _row_counts(batch)
        if not self.is_off and len(counts) > 1:
            self.is_off = True
            if self._shards > 1 and not self._apart:
                layer_report.warn(
                    f"tensors of a batch have {sorted(counts)} rows, so batches are not cut: each of {self._shards} "
                    "data shards computes all of them, and gains no time. To cut them, give all tensors one first dim, "
                    "or per_tensor_rows=True to the strategy"
                )
        return None if self.is_off else _one(counts)


def _row_counts(batch: Any) -> set[int]:
    counts: set[int] = set()

    def count(leaf: Any) -> None:
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            counts.add(int(shape[0]))

    of_batch(count, batch)
    return counts


def row_count(batch: Any) -> int:
    """Rows of a batch. Raises LayoutError where its arrays disagree or have none."""
    return _one(_row_counts(batch))


def _one(counts: set[int]) -> int:
    if len(counts) != 1:
        raise LayoutError(
            f"a batch must have one number of rows to be cut over devices, found {sorted(counts)}. Give every process "
            "the whole data (auto_shard_dataset=True): a batch of several numbers of rows is then computed by each"
        )
    return next(iter(counts))


def bounds(world: RankWorld, rank: int, total: int) -> tuple[int, int]:
    """Returns (start, length) of a rank's rows in a batch of `total`."""
    return chunk(total, world.data_shards)[world.data_place(rank)]


def rows_of(world: RankWorld, rank: int, total: int) -> Rows:
    sizes = chunked(0, total, world.data_shards).sizes
    return Rows(sizes[world.data_place(rank)], sizes)


def cut(batch: Any, start: int, length: int | None, *, copy: bool = False) -> Any:
    """Returns the rows [start, start + length) of every array of a batch, with no length all.

    They are copied where ranks share this process, because Keras multiplies masks into sample weights in place.
    """

    def part(x: Any) -> Any:
        if x is None or not hasattr(x, "shape") or not len(x.shape):
            return x
        rows = rows_from(x, start, length)
        if not copy:
            return rows
        if isinstance(rows, torch.Tensor):
            return rows.clone()
        # Another framework's tensors are not written to.
        return rows.copy() if isinstance(rows, np.ndarray) else rows

    return of_batch(part, batch)


def rows_already_local(world: RankWorld, batch: Any) -> Rows:
    """Rows where every process was given its own part (auto_shard_dataset=False): counted by a collective."""
    local = row_count(batch)
    return agreed_rows(world, local)


def agreed_rows(world: RankWorld, local: int) -> Rows:
    if not world.data_axes:
        return Rows(local, (local,))
    found = of_shards(world, local)
    if min(found) < 0:
        _tell_apart(world, found)
    return Rows(local, tuple(found))


def of_shards(world: RankWorld, number: int) -> list[int]:
    """Every data shard's number, in order. A collective."""
    return of_places(world, world.data_axes, number, "batch sizes")


def of_places(world: RankWorld, axes: Axes, number: int, purpose: str) -> list[int]:
    """The number of every place along the axes, in order. A collective."""
    cut = Sharding(world.mesh, Layout(axes), (world.mesh.axis_size(axes),))
    with events.for_purpose(purpose):
        found = world.backend.redistribute(torch.tensor([number]), cut, cut.with_layout(Layout()))
    return [int(n) for n in found]


def _tell_apart(world: RankWorld, found: list[int]) -> None:
    """Raises DesyncError unless the data of all shards has ended together."""
    if set(found) == {ENDED}:
        return
    how = "raised an error" if RAISED in found else "ended, while others have more batches"
    apart = [place for place, n in enumerate(found) if n == (RAISED if RAISED in found else ENDED)]
    raise DesyncError(
        f"auto_shard_dataset=False: the data of data shards {apart} of {len(found)} {how}. Give every process as many "
        "batches, or pass steps_per_epoch, which each of them can give",
        ranks=tuple(r for r in world.mesh.devices if world.data_place(r) in apart),
        collective="batch sizes",
    )
