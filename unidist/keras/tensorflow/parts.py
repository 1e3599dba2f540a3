"""Data in several processes: each is given its own part, or each reads the whole.

With parts (auto_shard_dataset=False) their rows are put on the mesh. Else all must read the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Axes, Layout, Mesh
from unidist.backends.protocol import Array
from unidist.errors import CapabilityError, DesyncError
from unidist.keras.feed.lockstep import Meeting, Part, as_parts, row_count
from unidist.keras.feed.tf_adapters import Around, Same
from unidist.keras.strategies.strategy import UnidistDistribution
from unidist.keras.tensorflow import values, worlds

# Whether each process brings its own rows; None: no model of several processes is at work.
_apart: ContextVar[bool | None] = ContextVar("unidist_dtensor_apart", default=None)


def are_given(distribution: UnidistDistribution) -> bool:
    """Returns whether each process brings its own rows."""
    return worlds.several() and not distribution.strategy.auto_shard_dataset


@contextlib.contextmanager
def reading(distribution: UnidistDistribution) -> Iterator[None]:
    """Inside, Keras's data adapters are made for a model of the distribution."""
    token = _apart.set(are_given(distribution) if worlds.several() else None)
    try:
        yield
    finally:
        _apart.reset(token)


def _of_all(number: int) -> tuple[int, ...]:
    return worlds.of_all(number, "batch sizes")


meeting = Meeting(_of_all, worlds.ranks_of)


class _Own(Around):
    """Its batches are Parts, in step with those of the other processes."""

    def __init__(self, adapter: Any) -> None:
        with meeting.told_to_all():
            super().__init__(adapter)
        self.num_batches = meeting.batches(adapter.num_batches)

    def __iter__(self) -> Iterator[Any]:
        return meeting.parts(tree.map_structure(_known, batch) for batch in self.dataset)


def _known(leaf: Any) -> Any:
    """tf.data has an Optional in place of None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def adapting(original: Any) -> Any:
    """Wraps Keras's get_data_adapter: gives a part of the data where each process has one, else all of it.

    All must see the same then.
    """

    @functools.wraps(original)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        apart = _apart.get()
        if apart is None:
            return original(*args, **kwargs)
        with meeting.told_to_all() if apart else contextlib.nullcontext():
            adapter = original(*args, **kwargs)
        if apart:
            return _Own(adapter)
        several = worlds.processes()
        return adapter if several is None else Same(adapter, several)

    return get_data_adapter


def counted(batch: Any) -> Any:
    """A batch that was given as it is (train_on_batch): of Parts. A collective."""
    if any(isinstance(leaf, Part) for leaf in tree.flatten(batch)):
        return batch
    return as_parts(batch, _of_all(row_count(batch)))


@dataclass(frozen=True)
class _Shards:
    """Says which processes hold which places of the data axis.

    Attributes:
        places: of each set of processes that hold the same, in order.
        processes: of each set.
    """

    places: tuple[tuple[int, ...], ...]
    processes: tuple[tuple[int, ...], ...]

    def rows(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the rows that each set has.

        Raises DesyncError: its processes, which must have the same, differ in number.
        """
        for own in self.processes:
            if len({counts[process] for process in own}) > 1:
                raise DesyncError(
                    f"auto_shard_dataset=False: processes {list(own)} hold the same part of every batch, but were "
                    f"given {[counts[process] for process in own]} rows: give them the same data",
                    ranks=tuple(rank for process in own for rank in worlds.ranks_of(process)),
                    collective="batch sizes",
                )
        return tuple(counts[own[0]] for own in self.processes)


@functools.lru_cache(maxsize=16)
def _shards(mesh: Mesh, axes: Axes) -> _Shards:
    """Raises CapabilityError: two processes hold parts of the data that overlap."""
    held: dict[int, set[int]] = {}
    for rank in mesh.devices:
        held.setdefault(worlds.process_of(rank), set()).add(mesh.group(axes, rank).index if axes else 0)
    sets: dict[tuple[int, ...], list[int]] = {}
    for process in sorted(held):
        sets.setdefault(tuple(sorted(held[process])), []).append(process)
    places = tuple(sorted(sets))
    if len(held) < worlds.backend().process_count() or sum(map(len, places)) > len(set().union(*places)):
        raise CapabilityError(
            f"auto_shard_dataset=False: on {mesh} the processes hold places {[sorted(held[p]) for p in sorted(held)]} "
            "of the data: each must hold places of its own, or the same as another. Use another mesh, or give every "
            "process the whole data"
        )
    return _Shards(places, tuple(tuple(sets[own]) for own in places))


def rows_of_counts(distribution: UnidistDistribution, counts: tuple[int, ...]) -> int:
    """Returns the rows of a batch where process p has counts[p]. Processes may hold the same ones.

    Raises:
        DesyncError: those that do were given different numbers of rows.
        CapabilityError: two processes hold parts of the data that overlap.
    """
    mesh = worlds.in_order(distribution.mesh)
    return sum(_shards(mesh, distribution.strategy.data_axes).rows(counts))


def pack(part: Part, distribution: UnidistDistribution) -> Any:
    """The global array, made of each process's own rows, in the order of their places on the mesh.

    Rows go to no other process where all places get the same number; else every device gets all.
    """
    strategy, mesh = distribution.strategy, worlds.in_order(distribution.mesh)
    shards = _shards(mesh, strategy.data_axes)
    rows = shards.rows(part.counts)
    each = {count / len(places) for count, places in zip(rows, shards.places, strict=True)}
    size = each.pop()
    if each or size != int(size) or not size:
        whole = _joined(part, shards, rows)
        divides = len(whole) % strategy.data_shards == 0
        wanted = strategy.batch() if divides else Layout()
        return values.put(whole, worlds.native_layout(wanted, whole.shape, distribution.mesh))
    shape = (int(size) * strategy.data_shards, *part.shape[1:])
    layout = worlds.native_layout(strategy.batch(), shape, distribution.mesh)
    return _packed(part.array, layout, int(size))


def _packed(array: Array, layout: dtensor.Layout, size: int) -> Any:
    axis = layout.sharding_specs[0]
    here = [0 if axis == values.U else place[axis] for place in layout.mesh.local_device_locations()]
    order = {place: k for k, place in enumerate(sorted(set(here)))}
    parts = [tf.constant(array[order[place] * size : (order[place] + 1) * size]) for place in here]
    return dtensor.pack(parts, layout)


def _joined(part: Part, shards: _Shards, rows: tuple[int, ...]) -> Array:
    """All rows on every process."""
    longest = max(rows)
    missing = [(0, longest - len(part.array)), *[(0, 0)] * (part.array.ndim - 1)]
    with events.for_purpose("uneven batches"):
        found = worlds.arrays_of_all(np.pad(part.array, missing))
    return np.concatenate([found[own[0]][:count] for own, count in zip(shards.processes, rows, strict=True)])
