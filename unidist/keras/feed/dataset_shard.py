"""Finds a process's own rows of a batched tf.data.Dataset by Keras's rule: part k of the k-th process.

Source of the rule: `Distribution.distribute_dataset` of Keras up to 3.15. Later versions have it inside their adapters.
"""

from __future__ import annotations

import sys
from typing import Any

from unidist import session
from unidist.errors import ArgumentError, LayoutError
from unidist.keras.feed.row_plan import RowPlan
from unidist.strategies import Strategy


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
    """Raises LayoutError unless the processes in order hold equal parts of the data shards in order."""
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
