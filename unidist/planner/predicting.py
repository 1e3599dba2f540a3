"""Predicting: the collectives and bytes of one training step, from the layouts and layers' calls.

What layers send is known where a step can be rehearsed (keras/torch/rehearsal.py). Elsewhere closed forms predict it.

A pair all_reduces the row's outputs forward and the gradient of the columns' common input backward; a column alone
gathers its outputs instead; of what meets a pair (keys of few heads) the output's gradient is summed; a table cut by
its vocabulary all_reduces what it looked up; what kernels of a stack give is summed, and so is the gradient of what
they take; where data axes cut these, rows or kernels are gathered, whichever is less; what no rule serves is gathered
for the call. What layers between them send is not predicted.

Gradients are summed over the data axes, by reduce_scatter where the states are spread over them (ZeRO); then values
are gathered: once behind the optimizer, or, where they are stored in parts too, as layers need them (fetching.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from unidist.algebra import Axes, Layout, Mesh
from unidist.algebra.step import ring_bytes
from unidist.events import Event
from unidist.ledger import Ledger
from unidist.planner.facts import Amount, Facts, LayerFact, StackFact, local_bytes, meetings
from unidist.planner.fetching import UNIT_BYTES, Member, fetches, units
from unidist.strategies import VariableLayouts

# What rows are sent for that go to the devices of a stack's kernels.
TO_KERNELS = "rows to kernels"


@dataclass(frozen=True, slots=True)
class Role:
    """Describes what a layer does under a plan.

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
    met = meetings(facts)
    meets = {k: found[row].axes for row in joined for k in met.get(row, ()) if k not in paired}
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


def stack_axes(stack: StackFact, layouts: list[Layout]) -> Axes:
    """Returns the axes that cut a stack of kernels, as `along_kernels` does."""
    return along_kernels(layouts[index] for index in stack.members)


def along_kernels(layouts: Iterable[Layout]) -> Axes:
    """Returns the axes that cut all that is cut of a stack along its first dim alone; else ()."""
    cuts = {layout.dims for layout in layouts if layout.dims}
    dims: tuple[Axes, ...] = cuts.pop() if len(cuts) == 1 else ()
    return dims[0] if len(dims) == 1 else ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a training step.

    Attributes:
        data_axes: those that cut the batch, of `batch` rows.
        sequence: length of open dims.
        context_axes: those that cut sequences, of these `lengths`.
        dispatches: kernels of a stack compute the rows that they have a weight for.
    """

    mesh: Mesh
    data_axes: Axes
    batch: int
    sequence: int
    context_axes: Axes = ()
    lengths: frozenset[int] = frozenset()
    dispatches: bool = False

    @property
    def rows(self) -> int:
        """Rows of the device that has most."""
        return -(-self.batch // (self.mesh.axis_size(self.data_axes) if self.data_axes else 1))

    @property
    def contexts(self) -> int:
        """Into how many parts sequences are cut."""
        return self.mesh.axis_size(self.context_axes) if self.context_axes else 1

    def event(self, op: str, axes: Axes, full: int, purpose: str) -> Event:
        group = self.mesh.group(axes, self.mesh.devices[0])
        return Event(op, axes, group.ranks, Fraction(ring_bytes(op, len(group.ranks), full)), purpose)

    def moved(self, op: str, axes: Axes, amounts: Iterable[Amount], itemsize: int, purpose: str) -> Iterator[Event]:
        """A collective for each of the amounts of activations."""
        for amount in amounts:
            size = amount.at(self.rows, self.sequence) // self.contexts
            yield self.event(op, axes, size * itemsize, purpose)


def predict(
    facts: Facts,
    layouts: list[Layout],
    step: Workload,
    triples: list[VariableLayouts],
    of_layers: Ledger | None = None,
) -> Ledger:
    """The collectives of one training step of the first device, in no order; none over axes of one place.

    Args:
        layouts: as layers see the variables. triples: where these rest and where their gradients are reduced to.
        of_layers: what layers send, where it is known; else it is predicted by closed forms.
    """
    if of_layers is None:
        sent = [*_of_layers(facts, layouts, step), *_over_contexts(facts, layouts, step)]
    else:
        sent = list(of_layers.events)
    sent += _gradients(facts, layouts, step, triples)
    return Ledger([event for event in sent if len(event.ranks) > 1])


def routed(sent: Ledger) -> str:
    """Says how many rows go to kernels on other devices, as gates choose; "" where none go.

    A device whose kernels all rows choose gets the rows of all others, and gives as many.
    """
    events = [event for event in sent.events if event.op == "all_to_all" and event.purpose.startswith(TO_KERNELS)]
    if not events:
        return ""
    even = sum((event.bytes for event in events), Fraction(0))
    most = sum((event.bytes * len(event.ranks) / 2 for event in events), Fraction(0))
    return (
        f"gates choose which rows are sent to kernels, {round(even):,} bytes if each is chosen as often, and at most "
        f"{round(most):,} of a device whose kernels all rows choose"
    )


def _of_layers(facts: Facts, layouts: list[Layout], step: Workload) -> Iterator[Event]:
    shared: set[tuple[int, Axes]] = set()
    known: set[int] = set()
    found = roles(facts, layouts)
    for layer, role in zip(facts.layers, found, strict=True):
        known |= {k for k in (layer.kernel, layer.bias, layer.reverse) if k is not None}
        yield from _of_layer(facts, layouts, layer, role, step, shared)
        known |= {index for index, _ in layer.beside}
        yield from _beside(facts, layouts, layer, role, step)
    for stack in facts.stacks:
        axes = stack_axes(stack, layouts)
        if axes and not set(axes) & set(step.data_axes):
            known |= set(stack.members)
            for amounts in (stack.calls.taken, stack.calls.given):
                yield from step.moved("all_reduce", axes, amounts, stack.calls.itemsize, stack.path)
        elif axes and stack.rows:
            rows = list(_rows_of_stack(stack, axes, step))
            kernels = [event.bytes for k in stack.members for event in _gathering(facts, layouts, k, 1, step)]
            if step.dispatches or rows[0].bytes < max(kernels):
                known |= set(stack.members)
                yield from rows
    for index, layout in enumerate(layouts):
        if index not in known and layout.sharded_axes:
            yield from _gathering(facts, layouts, index, 1, step)


def _of_layer(
    facts: Facts,
    layouts: list[Layout],
    layer: LayerFact,
    role: Role,
    step: Workload,
    shared: set[tuple[int, Axes]],
) -> Iterator[Event]:
    calls, axes, why = layer.calls, role.axes, layer.path
    if role.name == "gathered":
        for index in (layer.kernel, *(() if layer.bias is None else (layer.bias,))):
            yield from _gathering(facts, layouts, index, calls.count, step)
    elif role.name in ("vocabulary", "features"):
        op = "all_reduce" if role.name == "vocabulary" else "all_gather"
        yield from step.moved(op, axes, calls.given, calls.itemsize, why)
        yield from _scores(facts, layouts, layer, role, step)
    elif role.name == "row":
        yield from step.moved("all_reduce", axes, calls.given, calls.itemsize, why)
        if not role.paired:
            yield from step.moved("all_gather", axes, calls.taken, calls.itemsize, why)
    elif role.name == "column":
        if not role.paired:
            yield from step.moved("all_gather", axes, calls.given, calls.itemsize, why)
        if role.meets:
            yield from step.moved("reduce_scatter", axes, calls.given, calls.itemsize, why)
        # Layers that take the same tensor sum its gradient once.
        fresh = {n: amount for n, amount in zip(calls.inputs, calls.taken, strict=True) if (n, axes) not in shared}
        shared.update((number, axes) for number in fresh)
        yield from step.moved("all_reduce", axes, fresh.values(), calls.itemsize, why)
    elif role.meets:
        yield from step.moved("all_reduce", role.meets, calls.given, calls.itemsize, why)


def _beside(facts: Facts, layouts: list[Layout], layer: LayerFact, role: Role, step: Workload) -> Iterator[Event]:
    """Yields the sum of the gradient of that low-rank kernel of two which is whole.

    The product of the two is added to a kernel that is cut.
    """
    if role.name in ("column", "row"):
        for index, along in layer.beside:
            if along and not layouts[index].dims and facts.variables[index].trainable:
                for _ in range(layer.calls.count):
                    yield step.event("all_reduce", role.axes, facts.variables[index].bytes, layer.path)


def _scores(facts: Facts, layouts: list[Layout], layer: LayerFact, role: Role, step: Workload) -> Iterator[Event]:
    """Predicts a table's way back to the vocabulary.

    By its entries it is a column alone; by its features it is gathered.
    """
    calls, index = layer.scores, layer.kernel if layer.reverse is None else layer.reverse
    if role.name == "vocabulary" and calls.count:
        yield from step.moved("all_gather", role.axes, calls.given, calls.itemsize, layer.path)
        yield from step.moved("all_reduce", role.axes, calls.taken, calls.itemsize, layer.path)
    else:
        yield from _gathering(facts, layouts, index, calls.count, step)


def _gathering(facts: Facts, layouts: list[Layout], index: int, count: int, step: Workload) -> Iterator[Event]:
    variable, axes = facts.variables[index], layouts[index].sharded_axes
    for _ in range(count if axes else 0):
        yield step.event("all_gather", axes, variable.bytes, variable.path)
        # Over model axes each device has the whole gradient, and takes its part of it.
        if variable.trainable and set(axes) & set(step.data_axes):
            yield step.event("reduce_scatter", axes, variable.bytes, variable.path)


def _rows_of_stack(stack: StackFact, axes: Axes, step: Workload) -> Iterator[Event]:
    """Predicts what is sent where rows of all data shards come to each shard's kernels."""
    calls, count = stack.calls, step.mesh.axis_size(axes)
    taken, given = ([amount.times(count) for amount in amounts] for amounts in (calls.taken, calls.given))
    weights = [amount.times(count * stack.size) for amount in stack.rows] if step.dispatches else []
    back = "reduce_scatter" if step.dispatches else "all_reduce"
    for op, amounts in (("all_gather", (taken, weights, given)), (back, (given, taken, weights))):
        for some in amounts:
            yield from step.moved(op, axes, some, calls.itemsize, stack.path)


def _over_contexts(facts: Facts, layouts: list[Layout], step: Workload) -> Iterator[Event]:
    """Predicts the sum of the gradients of weights that parts of sequences used.

    What attention reads is left out.
    """
    if step.context_axes:
        learning = zip(facts.variables, layouts, strict=True)
        size = sum(local_bytes(v, layout, step.mesh) for v, layout in learning if v.trainable)
        yield step.event("all_reduce", step.context_axes, size, "weights on parts of the sequence")


def _gradients(facts: Facts, layouts: list[Layout], step: Workload, triples: list[VariableLayouts]) -> Iterator[Event]:
    """Predicts a sum for each set of data axes that leave variables whole, and a gathering of the rest.

    The gathering is of all that is fetched of what is spread over them. Engines may cut them into buckets and units.
    What is spread moves in parts of one length.
    """
    sizes: dict[tuple[str, Axes, str], int] = {}
    passes = _passes(facts, layouts, step, triples)
    for index, (variable, layout, three) in enumerate(zip(facts.variables, layouts, triples, strict=True)):
        spread = _spread(layout, three, step)
        rest = tuple(axis for axis in step.data_axes if layout.state(axis) == "I" and axis not in spread)
        part = local_bytes(variable, three.state, step.mesh)
        size = part * step.mesh.axis_size(spread) if spread else 0
        wanted = [("all_gather", spread, "parameters", size * passes[index])] if passes[index] else []
        if variable.trainable and spread:
            wanted.append(("reduce_scatter", spread, "gradients", size))
        if variable.trainable and rest:
            wanted.append(("all_reduce", rest, "gradients", part))
        for op, over, purpose, moved in wanted:
            sizes[op, over, purpose] = sizes.get((op, over, purpose), 0) + moved
    for (op, axes, purpose), size in sizes.items():
        yield step.event(op, axes, size, purpose)


def _spread(layout: Layout, three: VariableLayouts, step: Workload) -> Axes:
    """The data axes that leave a variable whole to its layer, and cut its state."""
    return tuple(axis for axis in step.data_axes if layout.state(axis) == "I" and three.state.state(axis) == "S")


def _passes(facts: Facts, layouts: list[Layout], step: Workload, triples: list[VariableLayouts]) -> list[int]:
    """Returns how often each variable is gathered over the data axes that its state is spread over."""
    spread = [_spread(layout, three, step) for layout, three in zip(layouts, triples, strict=True)]
    stored = [
        bool(axes) and any(three.storage.state(axis) == "S" for axis in axes)
        for axes, three in zip(spread, triples, strict=True)
    ]
    # What is not trained is updated by no optimizer, so joined behind none.
    found = [int(bool(axes) and v.trainable) for axes, v in zip(spread, facts.variables, strict=True)]
    if not facts.neighbours:
        return [2 if is_stored else count for is_stored, count in zip(stored, found, strict=True)]

    def member(k: int) -> Member:
        variable = facts.variables[k]
        return Member(k, (spread[k], variable.dtype), local_bytes(variable, layouts[k], step.mesh))

    unit = units([[member(k) for k in own if stored[k]] for own in facts.neighbours], UNIT_BYTES)
    forward, backward = ([unit[k] for k in used if k in unit] for used in (facts.read, reversed(facts.kept)))
    counts = fetches(forward, backward)
    return [counts[unit[k]] if k in unit else count for k, count in enumerate(found)]
