"""Data in several processes: each is given its own part, or each reads the whole.

With parts (auto_shard_dataset=False) their rows are put on the mesh. Else all must read the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Axes, Layout, Mesh
from unidist.backends.protocol import Array
from unidist.errors import CapabilityError, DesyncError
from unidist.keras.feed.lockstep import Meeting, Part, as_parts, in_step, row_count, same
from unidist.keras.feed.row_plan import RowPlan
from unidist.keras.patching.patches import calling
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow import values, worlds

# Whose data is read; None: no model is at work.
_read_for: ContextVar[UnidistDistribution | None] = ContextVar("unidist_dtensor_read_for", default=None)


def are_given(distribution: UnidistDistribution) -> bool:
    """Returns whether each process brings its own rows."""
    return worlds.several() and not distribution.strategy.auto_shard_dataset


@contextlib.contextmanager
def reading(distribution: UnidistDistribution) -> Iterator[None]:
    """Inside, Keras's data adapters are made for a model of the distribution."""
    token = _read_for.set(distribution)
    try:
        yield
    finally:
        _read_for.reset(token)


def _known(leaf: Any) -> Any:
    """tf.data has an Optional in place of None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


@calling
def adapting(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps Keras's get_data_adapter: gives a part of the data where each process has one, else all of it.

    All must see the same then.
    """
    distribution = _read_for.get()
    several = None if distribution is None else worlds.processes()
    if distribution is None or several is None:
        return original(*args, **kwargs)
    meeting = None if distribution.strategy.auto_shard_dataset else Meeting(several)
    with meeting.told_to_all() if meeting else contextlib.nullcontext():
        adapter = original(*args, **kwargs)
        dataset = adapter.get_tf_dataset()
    if meeting is not None:
        around = in_step(adapter, lambda: (tree.map_structure(_known, batch) for batch in dataset), meeting)
    else:
        around = same(adapter, lambda: dataset, several)
    around.element_spec = dataset.element_spec
    return around


def counted(batch: Any) -> Any:
    """A batch that was given as it is (train_on_batch): of Parts. A collective."""
    if any(isinstance(leaf, Part) for leaf in tree.flatten(batch)):
        return batch
    return as_parts(batch, worlds.of_all(row_count(batch), "batch sizes"))


@functools.lru_cache(maxsize=16)
def _plan(mesh: Mesh, axes: Axes) -> RowPlan:
    """Raises CapabilityError: two processes hold parts of the data that overlap."""
    plan = RowPlan.of(mesh, axes, worlds.process_of, worlds.backend().process_count())
    places = set(plan.held)
    if not all(places) or sum(map(len, places)) > len(set().union(*places)):
        raise CapabilityError(
            f"auto_shard_dataset=False: on {mesh} the processes hold places {[list(own) for own in plan.held if own]} "
            "of the data: each must hold places of its own, or the same as another. Use another mesh, or give every "
            "process the whole data"
        )
    return plan


def _plan_of(distribution: UnidistDistribution, counts: tuple[int, ...]) -> RowPlan:
    """Raises DesyncError: processes that hold the same, and so must have the same, differ in number."""
    plan = _plan(worlds.in_order(distribution.mesh), distribution.strategy.data_axes)
    for own in plan.holders.values():
        if len({counts[process] for process in own}) > 1:
            raise DesyncError(
                f"auto_shard_dataset=False: processes {list(own)} hold the same part of every batch, but were given "
                f"{[counts[process] for process in own]} rows: give them the same data",
                ranks=tuple(rank for process in own for rank in worlds.ranks_of(process)),
                collective="batch sizes",
            )
    return plan


def rows_of_counts(distribution: UnidistDistribution, counts: tuple[int, ...]) -> int:
    """Returns the rows of a batch where process p has counts[p]. Processes may hold the same ones.

    Raises:
        DesyncError: those that do were given different numbers of rows.
        CapabilityError: two processes hold parts of the data that overlap.
    """
    return _plan_of(distribution, counts).total(counts)


def pack(part: Part, distribution: UnidistDistribution) -> Any:
    """The global array, made of each process's own rows, in the order of their places on the mesh.

    Rows go to no other process where all places get the same number; else every device gets all.
    """
    strategy, plan = distribution.strategy, _plan_of(distribution, part.counts)
    each = {count / len(own) for count, own in zip(part.counts, plan.held, strict=True)}
    size = each.pop()
    if each or size != int(size) or not size:
        whole = _joined(part, plan)
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


def _joined(part: Part, plan: RowPlan) -> Array:
    longest = max(part.counts)
    missing = [(0, longest - len(part.array)), *[(0, 0)] * (part.array.ndim - 1)]
    with events.for_purpose("uneven batches"):
        found = worlds.arrays_of_all(np.pad(part.array, missing))
    firsts = [processes[0] for processes in plan.holders.values()]
    return np.concatenate([found[process][: part.counts[process]] for process in firsts])
