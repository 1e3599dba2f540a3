"""Says which rows of a batch are whose: it is cut into parts, and each process holds some of them.

Sizes are torch.chunk's, like those of every dim in unidist: the last parts may have fewer rows, or none. Who has none
takes part all the same.

Source of the rule for a tf.data.Dataset that a program shares out itself: `Distribution.distribute_dataset` of Keras up
to 3.15. Later versions have it inside their adapters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidist import session
from unidist.algebra import Axes, Mesh, chunk
from unidist.errors import ArgumentError, LayoutError
from unidist.keras.feed.lockstep import Part, rowwise
from unidist.strategies import Strategy


@dataclass(frozen=True)
class Share:
    """Holds the rows of one batch that a process has.

    Attributes:
        counts: how many every process has.
        rows: the numbers of this one's.
        total: rows of the whole batch.
    """

    counts: tuple[int, ...]
    rows: tuple[int, ...]
    total: int

    def take(self, indices: Any) -> Any:
        """This process's part of what stands for a batch's rows: a list or array of numbers, or a slice."""
        if isinstance(indices, list):
            return [indices[k] for k in self.rows]
        if not isinstance(indices, slice):
            return indices[list(self.rows)]
        rows = np.asarray(self.rows, np.int64) + indices.start
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return rows

    def parts(self, batch: Any) -> Any:
        """The batch, of this process's rows and perhaps more behind them, as parts of the whole."""
        return rowwise(lambda array: Part(array[: len(self.rows)], self.counts, self.total), batch)


@dataclass(frozen=True)
class RowPlan:
    """Says which parts of every batch each process holds.

    Attributes:
        held: of each process, its parts in order. Several processes may hold the same.
        parts: into how many a batch is cut.

    Example:
        >>> plan = RowPlan.of(Mesh({"data": 4}), ("data",), lambda rank: rank // 2, 2)
        >>> plan.held, plan.share(9, 1)
        (((0, 1), (2, 3)), Share(counts=(6, 3), rows=(6, 7, 8), total=9))
    """

    held: tuple[tuple[int, ...], ...]
    parts: int

    @staticmethod
    def of(mesh: Mesh, axes: Axes, process_of: Callable[[int], int], processes: int) -> RowPlan:
        """The plan of a mesh whose `axes` cut the batch.

        Args:
            process_of: a rank's process.
            processes: how many there are; those with no rank on the mesh hold nothing.
        """
        held: list[set[int]] = [set() for _ in range(processes)]
        for rank in mesh.devices:
            held[process_of(rank)].add(mesh.group(axes, rank).index)
        return RowPlan(tuple(tuple(sorted(own)) for own in held), mesh.axis_size(axes))

    @functools.cached_property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Parts -> the processes that hold just them, both in order."""
        places = range(len(self.held))
        return {own: tuple(k for k in places if self.held[k] == own) for own in sorted(set(self.held))}

    def share(self, total: int, process: int) -> Share:
        """A process's rows of a batch of `total`."""
        return _share(self, total, process)

    def total(self, counts: tuple[int, ...]) -> int:
        """Rows of a batch where process p was given counts[p]; processes that hold the same count once."""
        return sum(dict(zip(self.held, counts, strict=True)).values())


@functools.lru_cache(maxsize=64)
def _share(plan: RowPlan, total: int, process: int) -> Share:
    bounds = chunk(total, plan.parts)
    counts = tuple(sum(bounds[part][1] for part in own) for own in plan.held)
    rows = (range(start, start + length) for start, length in (bounds[part] for part in plan.held[process]))
    return Share(counts, tuple(row for part in rows for row in part), total)


def own_part(dataset: Any, strategy: Strategy, process: int, processes: int) -> Any:
    """Returns what one process has of a dataset; those that share a data shard have the same.

    Raises:
        ArgumentError: no batched tf.data.Dataset, or its batches do not divide.
        LayoutError: the devices of a process hold other rows than its part.
    """
    # Who has a dataset of TensorFlow's has imported it.
    tf: Any = sys.modules.get("tensorflow")
    if tf is None or not isinstance(dataset, tf.data.Dataset):
        raise ArgumentError(
            f"distribute_dataset takes a tf.data.Dataset, found {type(dataset)}: give fit the whole data, which it cuts"
        )
    _check_parts(strategy, processes)
    parts = min(strategy.data_shards, processes)
    if parts > 1:
        size = _batch_size(dataset, tf)
        if size % parts:
            raise ArgumentError(
                f"distribute_dataset gives each of {parts} parts of the processes as many rows of a batch, and {size} "
                f"rows do not divide: use a batch size that {parts} divides"
            )
        dataset = dataset.rebatch(size // parts).shard(parts, process * parts // processes)
    return dataset.prefetch(tf.data.AUTOTUNE)


def _batch_size(dataset: Any, tf: Any) -> int:
    from tensorflow.python.data.experimental.ops import distribute

    specs = tf.nest.flatten(dataset.element_spec)
    are_batched = all(getattr(spec, "shape", None) is not None and spec.shape.rank != 0 for spec in specs)
    size = int(distribute.compute_batch_size(dataset).numpy()) if are_batched else -1
    if size < 0:
        raise ArgumentError(
            f"distribute_dataset takes batches of a known size, found elements of {dataset.element_spec}: "
            "dataset.batch(batch_size) makes them"
        )
    return size


def _check_parts(strategy: Strategy, processes: int) -> None:
    each = len(session.list_devices()) // processes
    shards = strategy.data_shards
    parts = min(shards, processes)
    plan = RowPlan.of(strategy.mesh, strategy.data_axes, lambda rank: rank // each, processes)
    for process, own in enumerate(plan.held):
        part = process * parts // processes
        if own != tuple(k for k in range(shards) if k * parts // shards == part):
            raise LayoutError(
                f"distribute_dataset gives process {process} part {part} of {parts} of each batch, but on "
                f"{strategy.mesh} its devices hold places {list(own)} of {shards} of the data: give fit the whole "
                "data, which it cuts as the mesh says, or use a mesh with all devices in their order"
            )
