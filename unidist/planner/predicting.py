"""Predicting: the collectives and bytes of one training step, from the layouts and what layers do in a step.

Rules: a pair all_reduces the row's outputs forward and the gradient of the columns' common input backward; a column
alone gathers its outputs instead; of what meets a pair (keys of few heads) the output's gradient is summed; a table cut
by its vocabulary all_reduces what it looked up; what no rule serves is gathered for the call. Gradients are summed over
the data axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from unidist.algebra import Axes, Layout, Mesh
from unidist.algebra.step import ring_bytes
from unidist.events import Event
from unidist.ledger import Ledger
from unidist.planner.facts import Affine, Facts, LayerFact, local_bytes, meeting


@dataclass(frozen=True, slots=True)
class Role:
    """What a layer does under a plan.

    Attributes:
        name: "column", "row", "vocabulary", "features", "gathered" or "whole".
        paired: column: its output stays cut; row: its input comes cut.
        meets: axes of a pair that works with its whole output: the devices' gradients of it are summed.
    """

    name: str
    axes: Axes = ()
    paired: bool = False
    meets: Axes = ()


def roles(facts: Facts, layouts: list[Layout]) -> list[Role]:
    """The role of each layer, from the layout of its kernel; pairs where a measured reach joins two cuts."""
    found = [_role(layer, layouts[layer.kernel]) for layer in facts.layers]
    joined = pairs(facts, layouts)
    paired = {k for row, columns in joined.items() for k in (row, *columns)}
    meets = {k: found[row].axes for row in joined for k in meeting(facts, row) if k not in paired}
    return [Role(role.name, role.axes, k in paired, meets.get(k, ())) for k, role in enumerate(found)]


def pairs(facts: Facts, layouts: list[Layout]) -> dict[int, tuple[int, ...]]:
    """Row layer -> its column layers, where a measured reach joins their cuts."""
    found: dict[int, tuple[int, ...]] = {}
    for reach in facts.reaches:
        if reach.target is None:
            continue
        row, dim = reach.target
        source, target = facts.layers[reach.source], facts.layers[row]
        cuts, meets = layouts[source.kernel].dim_axes(reach.dim), layouts[target.kernel].dim_axes(dim)
        alone = all(
            _role(layer, layouts[layer.kernel]).name == name for layer, name in ((source, "column"), (target, "row"))
        )
        if cuts and cuts == meets and alone:
            found[row] = (*found.get(row, ()), reach.source)
    return found


def _role(layer: LayerFact, layout: Layout) -> Role:
    cuts = [(dim, axes) for dim, axes in enumerate(layout.dims) if axes]
    if not cuts:
        return Role("whole")
    axes = layout.sharded_axes
    if len(cuts) > 1 or layer.kind == "convolution":
        return Role("gathered", axes)
    dim = cuts[0][0]
    if layer.kind == "table":
        return Role("vocabulary" if dim == 0 else "features", axes)
    if dim in layer.outputs:
        return Role("column", axes)
    return Role("row" if dim in layer.inputs else "gathered", axes)


@dataclass(frozen=True, slots=True)
class Step:
    """What a training step is: the mesh, the axes that cut the batch, its rows and the length of a sequence."""

    mesh: Mesh
    data_axes: Axes
    batch: int
    sequence: int

    @property
    def rows(self) -> int:
        """Rows of the device that has most."""
        return -(-self.batch // (self.mesh.axis_size(self.data_axes) if self.data_axes else 1))

    def event(self, op: str, axes: Axes, full: int, purpose: str) -> Event:
        group = self.mesh.group(axes, self.mesh.devices[0])
        return Event(op, axes, group.ranks, Fraction(ring_bytes(op, len(group.ranks), full)), purpose)

    def moved(self, op: str, axes: Axes, elements: Affine, itemsize: int, count: int, purpose: str) -> Iterator[Event]:
        """`count` collectives that together move activations of `elements` for each row of the batch."""
        full = elements.at(self.sequence) * self.rows * itemsize
        for k in range(count):
            yield self.event(op, axes, full * (k + 1) // count - full * k // count, purpose)


def predict(facts: Facts, layouts: list[Layout], step: Step) -> Ledger:
    """The collectives of one training step of the first device, in no order; none over axes of one place."""
    ledger = Ledger()
    shared: set[tuple[int, Axes]] = set()
    known: set[int] = set()
    for layer, role in zip(facts.layers, roles(facts, layouts), strict=True):
        known |= {k for k in (layer.kernel, layer.bias, layer.reverse) if k is not None}
        for event in _of_layer(facts, layouts, layer, role, step, shared):
            ledger.add(event)
    for index, layout in enumerate(layouts):
        if index not in known and layout.sharded_axes:
            for event in _gathering(facts, layouts, index, 1, step):
                ledger.add(event)
    for event in _gradients(facts, layouts, step):
        ledger.add(event)
    ledger.events = [event for event in ledger.events if len(event.ranks) > 1]
    return ledger


def _of_layer(
    facts: Facts, layouts: list[Layout], layer: LayerFact, role: Role, step: Step, shared: set[tuple[int, Axes]]
) -> Iterator[Event]:
    calls, axes, why = layer.calls, role.axes, layer.path
    if role.name == "gathered":
        yield from _gathering(facts, layouts, layer.kernel, calls.count, step)
    elif role.name in ("vocabulary", "features"):
        op = "all_reduce" if role.name == "vocabulary" else "all_gather"
        yield from step.moved(op, axes, calls.given, calls.itemsize, calls.count, why)
        yield from _scores(facts, layouts, layer, role, step)
    elif role.name == "row":
        yield from step.moved("all_reduce", axes, calls.given, calls.itemsize, calls.count, why)
        if not role.paired:
            yield from step.moved("all_gather", axes, calls.taken, calls.itemsize, calls.count, why)
    elif role.name == "column":
        if not role.paired:
            yield from step.moved("all_gather", axes, calls.given, calls.itemsize, calls.count, why)
        if role.meets:
            yield from step.moved("reduce_scatter", axes, calls.given, calls.itemsize, calls.count, why)
        # Layers that take the same tensor sum its gradient once.
        fresh = [number for number in calls.inputs if (number, axes) not in shared]
        shared.update((number, axes) for number in fresh)
        if fresh:
            part = len(fresh) / calls.count
            taken = Affine(calls.taken.constant * part, calls.taken.slope * part)
            yield from step.moved("all_reduce", axes, taken, calls.itemsize, len(fresh), why)
    elif role.meets:
        yield from step.moved("all_reduce", role.meets, calls.given, calls.itemsize, calls.count, why)


def _scores(facts: Facts, layouts: list[Layout], layer: LayerFact, role: Role, step: Step) -> Iterator[Event]:
    """A table's way back to the vocabulary: by its entries it is a column alone; by its features it is gathered."""
    calls, index = layer.scores, layer.kernel if layer.reverse is None else layer.reverse
    if role.name == "vocabulary" and calls.count:
        yield from step.moved("all_gather", role.axes, calls.given, calls.itemsize, calls.count, layer.path)
        yield from step.moved("all_reduce", role.axes, calls.taken, calls.itemsize, calls.count, layer.path)
    else:
        yield from _gathering(facts, layouts, index, calls.count, step)


def _gathering(facts: Facts, layouts: list[Layout], index: int, count: int, step: Step) -> Iterator[Event]:
    variable, axes = facts.variables[index], layouts[index].sharded_axes
    for _ in range(count if axes else 0):
        yield step.event("all_gather", axes, variable.bytes, variable.path)
        # Over model axes each device has the whole gradient, and takes its part of it.
        if variable.trainable and set(axes) & set(step.data_axes):
            yield step.event("reduce_scatter", axes, variable.bytes, variable.path)


def _gradients(facts: Facts, layouts: list[Layout], step: Step) -> Iterator[Event]:
    """One sum for each set of data axes that leave variables whole; engines may cut it into buckets."""
    sizes: dict[Axes, int] = {}
    for variable, layout in zip(facts.variables, layouts, strict=True):
        axes = tuple(axis for axis in step.data_axes if layout.state(axis) == "I")
        if variable.trainable and axes:
            sizes[axes] = sizes.get(axes, 0) + local_bytes(variable, layout, step.mesh)
    for axes, size in sizes.items():
        yield step.event("all_reduce", axes, size, "gradients")
