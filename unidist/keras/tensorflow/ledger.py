"""Predicts what a step communicates from the layouts, where it is no program to read (compiled.py)."""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from keras import tree

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, ring_bytes
from unidist.backends.protocol import itemsize
from unidist.keras.records import variable_record
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow import worlds


def record(model: Any, distribution: UnidistDistribution, kind: str, batch: Any) -> None:
    """Reports to the ledger what one run of a step needs at least, with the word "predicted".

    In a training step every gradient is reduced over the data axes, where the rows of the batch are cut over them (a
    lookup's rows are gathered instead; how many they are is not known here, and the table is counted). A
    variable that rests in smaller parts than layers read it in is gathered for that, once, and one that is updated in
    smaller parts than it rests in after that. A weight whose contracted dim is sharded reduces the layer's result, and
    one whose other dim is sharded the gradient of its input: of these the rows of one device are counted, as wide as
    the unsharded dim.
    """
    if not events.listening():
        return
    strategy, mesh = distribution.strategy, worlds.in_order(distribution.mesh)
    rows = next((int(leaf.shape[0]) for leaf in tree.flatten(batch) if leaf is not None and len(leaf.shape)), 0)
    cut = bool(strategy.data_axes) and rows % strategy.data_shards == 0
    purpose = f"{kind.replace('_', ' ')} (predicted)"
    trained = kind == "train_step"
    trainable = {id(variable) for variable in model.trainable_variables}
    for variable in model.weights:
        found: Any = variable_record.of(variable).layouts
        shape, size = tuple(variable.shape), itemsize(str(variable.dtype))
        full, read = prod(shape) * size, Layout(*found.compute.dims)
        _emit_gather(found.storage, read, mesh, full, purpose)
        if trained and id(variable) in trainable:
            if cut:
                _emit("all_reduce", strategy.data_axes, mesh, full // _parts(read, mesh), purpose)
            _emit_gather(found.state, found.storage, mesh, full, purpose)
        if _axes(read) and len(shape) > 1:
            contracted = bool(read.dim_axes(0))
            if contracted or trained:
                share = rows // strategy.data_shards if cut else rows
                _emit("all_reduce", _axes(read), mesh, share * shape[1 if contracted else 0] * size, purpose)


def _emit_gather(before: Layout, after: Layout, mesh: Mesh, full: int, purpose: str) -> None:
    gone = tuple(axis for axis in _axes(before) if axis not in _axes(after))
    if gone:
        _emit("all_gather", gone, mesh, full // _parts(after, mesh), purpose)


def _parts(layout: Layout, mesh: Mesh) -> int:
    return mesh.axis_size(_axes(layout)) if _axes(layout) else 1


def _axes(layout: Layout) -> Axes:
    return tuple(axis for axes in layout.dims for axis in axes)


def _emit(op: str, axes: Axes, mesh: Mesh, full: int, purpose: str) -> None:
    group = mesh.group(axes, worlds.backend().local_ranks()[0])
    sent: Fraction = ring_bytes(op, group.size, full)
    events.emit(events.Event(op, axes, group.ranks, sent, purpose))
