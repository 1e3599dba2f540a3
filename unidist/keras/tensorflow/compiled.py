"""Reads what a compiled step communicates from the program that DTensor made for one device here.

DTensor keeps its programs to itself. But TensorFlow collects the graphs that it hands to each device, where somebody
asks before a function runs for the first time; in them DTensor's collectives stand as they are executed. On CPU, for
one, an all-gather is an all-reduce of parts with zeros around them, and is reported as that.

Where there is no program to read, the layouts predict it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context
from tensorflow.python.ops import summary_ops_v2

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, ring_bytes
from unidist.backends.protocol import itemsize
from unidist.events import Event
from unidist.keras.records import variable_record
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow import values, worlds

_OPS = {
    "CollectiveReduceV2": "all_reduce",
    "CollectiveGatherV2": "all_gather",
    "CollectiveReduceScatterV2": "reduce_scatter",
    "CollectiveAllToAllV2": "all_to_all",
}


class GraphCollectives:
    """The collectives of one program.

    Attributes:
        events: one for each, as the first rank of this process on the mesh takes part in it; None until the program
            has run while this watched, and where it could not be read: somebody else collects TensorFlow's graphs (as
            tf.summary.trace_on does), or the collectives are not of the kinds that DTensor makes on CPU and GPU.
    """

    def __init__(self, mesh: Mesh, purpose: str) -> None:
        self._mesh = worlds.in_order(mesh)
        self._purpose = purpose
        self.events: tuple[Event, ...] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Any]]:
        """Around the program's first run, whose results are put into the list."""
        results: list[Any] = []
        ranks = [rank for rank in worlds.backend().local_ranks() if rank in self._mesh.devices]
        if summary_ops_v2._current_trace_context is not None or not ranks:
            yield results
            return
        here = context.context()
        here.enable_graph_collection()
        try:
            here.export_run_metadata()  # what is left of a run that failed
            yield results
            _wait_for(results)
            graphs = here.export_run_metadata().partition_graphs
        finally:
            here.disable_graph_collection()
        found = list(self._read(graphs, min(ranks)))
        self.events = None if None in found else tuple(event for event in found if event is not None)

    def _read(self, graphs: Any, rank: int) -> Iterator[Event | None]:
        device = worlds.backend().devices[rank]
        for graph in graphs:
            nodes = {node.name: node for node in graph.node}
            for node in graph.node:
                if node.op.startswith("Collective") and node.device == device:
                    yield self._event(node, nodes, rank)

    def _event(self, node: Any, nodes: Mapping[str, Any], rank: int) -> Event | None:
        op, keys = _OPS.get(node.op), _group_keys(node, nodes)
        if op is None or len(keys) != self._mesh.size or not node.attr["_output_shapes"].list.shape:
            return None
        own = keys[self._mesh.devices.index(rank)]
        members = tuple(other for other, key in zip(self._mesh.devices, keys, strict=True) if key == own)
        shape = [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim]
        size = prod(shape) * tf.dtypes.as_dtype(node.attr["T"].type).size
        full = size * len(members) if op == "reduce_scatter" else size
        sent = ring_bytes(op, len(members), full)
        return Event(op, _axes(members, self._mesh, rank), members, sent, self._purpose)


def _wait_for(results: Any) -> None:
    """A program has been handed to the devices once something of it has arrived."""
    for leaf in tree.flatten(results):
        if values.is_spread(leaf):
            dtensor.unpack(leaf)[0].numpy()


def _group_keys(node: Any, nodes: Mapping[str, Any]) -> list[int]:
    """Returns the keys of the groups by the mesh's places; [] if not found.

    They are a constant; each device takes its own of it.
    """
    source: Any = node
    given = node.input[2] if len(node.input) > 2 else ""
    while given and (source := nodes.get(given.partition(":")[0])) is not None and source.op != "Const":
        given = source.input[0] if source.input else ""
    if not given or source is None:
        return []
    return [int(key) for key in np.ravel(tf.make_ndarray(source.attr["value"].tensor))]


def _axes(members: tuple[int, ...], mesh: Mesh, rank: int) -> Axes:
    for count in range(1, len(mesh.axes) + 1):
        for axes in combinations(mesh.axis_names, count):
            if set(mesh.group(axes, rank).ranks) == set(members):
                return axes
    return ()


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
        if read.sharded_axes and len(shape) > 1:
            contracted = bool(read.dim_axes(0))
            if contracted or trained:
                share = rows // strategy.data_shards if cut else rows
                _emit("all_reduce", read.sharded_axes, mesh, share * shape[1 if contracted else 0] * size, purpose)


def _emit_gather(before: Layout, after: Layout, mesh: Mesh, full: int, purpose: str) -> None:
    gone = tuple(axis for axis in before.sharded_axes if axis not in after.sharded_axes)
    if gone:
        _emit("all_gather", gone, mesh, full // _parts(after, mesh), purpose)


def _parts(layout: Layout, mesh: Mesh) -> int:
    return mesh.axis_size(layout.sharded_axes) if layout.sharded_axes else 1


def _emit(op: str, axes: Axes, mesh: Mesh, full: int, purpose: str) -> None:
    group = mesh.group(axes, worlds.backend().local_ranks()[0])
    sent: Fraction = ring_bytes(op, group.size, full)
    events.emit(events.Event(op, axes, group.ranks, sent, purpose))
