"""Plan: for each variable its layout and why, what a device holds, and what a training step sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from unidist import names
from unidist.algebra import Axes, Layout, Mesh
from unidist.errors import LayoutError
from unidist.ledger import Ledger
from unidist.planner.choosing import Choice, Chooser, size_text
from unidist.planner.facts import Facts, Reach, VariableFact, local_bytes
from unidist.planner.holding import Rehearsed, activation_bytes
from unidist.planner.layout_map import LayoutMap
from unidist.planner.predicting import Workload, pairs, predict, roles, routed
from unidist.planner.replicas import Replicas, compared
from unidist.strategies import Strategy, VariableLayouts
from unidist.tables import titled


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One variable.

    Attributes:
        layouts: where it rests, where a layer needs it, and where its gradient is reduced to.
        bytes_per_device: of the value; of the device that holds most.
        gradient_bytes_per_device: of its gradient, once it is reduced.
        slot_bytes_per_device: of the optimizer's slots, wherever they rest.
        reason: why it has these layouts.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    layouts: VariableLayouts
    bytes: int
    bytes_per_device: int
    gradient_bytes_per_device: int
    slot_bytes_per_device: int
    reason: str

    @property
    def layout(self) -> Layout:
        return self.layouts.storage

    @property
    def is_sharded(self) -> bool:
        return bool(self.layouts.storage.dims)


@dataclass(frozen=True)
class Plan:
    """Says how a model is laid out on a mesh.

    Attributes:
        rows: one for each variable, in the model's order.
        predicted: a Ledger of one training step of `batch` rows. On torch the model is called without values, and the
            ledger is that of a step; metrics are left out.
        sequence: the length of open dims; None where the model has none.
        estimated: why `predicted` is an estimate, as where a compiler chooses what is sent; "" where it is none.
        context_axes: those that cut sequences. On torch what is kept of a step on parts of sequences is counted in the
            call without values.
        pairs: (column paths..., row path) of the layers between which activations stay cut.
        shared: (path of a layer, axes) of those whose whole outputs each device works with in a pair, as keys of few
            heads: the devices' gradients of them are summed.
        layout_map: the sharded variables' exact paths and layouts: print it, change it, give it to ModelParallel.
        optimizer: whose slots are counted.
        zero: the stage of ZeRO. offload: "states": the slots rest in host memory.
        replicas: what replicas of shards cost and save; None without ZeRO over several data axes.
        activation_bytes_per_device: an estimate of what forward keeps for backward, of the device that has most rows:
            each tensor that an innermost layer takes or gives, once. Tensors between the layers of a pair are cut with
            it. Of layers that backward computes again their inputs count, and the largest one. Not counted are
            dropout's masks, what operations that stand in no layer keep besides, the loss and sequence parallelism. A
            compiler (JAX, `jit_compile=True`) keeps less.

    Example:
        >>> import keras, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)])
        >>> found = unidist.plan(model, unidist.Mesh({"model": 2}))
        >>> [str(row.layout) for row in found.rows]
        ["Layout(None, 'model')", "Layout('model')", "Layout('model')", 'Layout()']
    """

    name: str
    mesh: Mesh
    data_axes: Axes
    rows: tuple[PlanRow, ...]
    pairs: tuple[tuple[str, ...], ...]
    predicted: Ledger = field(compare=False)
    layout_map: LayoutMap = field(compare=False)
    batch: int
    sequence: int | None
    optimizer: str
    zero: int = 0
    activation_bytes_per_device: int = 0
    shared: tuple[tuple[str, Axes], ...] = ()
    estimated: str = ""
    context_axes: Axes = ()
    offload: str = "none"
    replicas: Replicas | None = None

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the variables' values on the device that holds most."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def slot_bytes_per_device(self) -> int:
        """Bytes of the optimizer's slots on the device that holds most; 0 where they rest in host memory."""
        return self._slot_bytes - self.host_bytes_per_device

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes of its slots that rest in host memory (`offload="states"`)."""
        return self._slot_bytes if self.offload == "states" else 0

    @property
    def _slot_bytes(self) -> int:
        return sum(row.slot_bytes_per_device for row in self.rows)

    @property
    def gradient_bytes_per_device(self) -> int:
        """Bytes of the reduced gradients on the device that holds most."""
        return sum(row.gradient_bytes_per_device for row in self.rows)

    @property
    def sharded_fraction(self) -> float:
        """The part of the model's bytes that is in sharded variables."""
        total = sum(row.bytes for row in self.rows)
        return sum(row.bytes for row in self.rows if row.is_sharded) / total if total else 0.0

    @property
    def batch_in_words(self) -> str:
        """The rows of a step and, where it has one, the length of their sequence."""
        return f"{self.batch:,} rows" + ("" if self.sequence is None else f", sequence length {self.sequence:,}")

    @property
    def idle(self) -> str:
        """Why the axes that may cut variables cut none; "" where they cut some, or there are none."""
        busy = (*self.data_axes, *self.context_axes)
        axes = [(name, size) for name, size in self.mesh.axes if name not in busy and size > 1]
        if not axes or any(row.is_sharded for row in self.rows):
            return ""
        over = " and ".join(f"{name}={size}" for name, size in axes)
        most = max(self.rows, key=lambda row: row.bytes, default=None)
        why = "" if most is None else f" (of {most.path!r}, the largest: {most.reason})"
        return (
            f"nothing is cut over {over}: each of these devices holds the whole model and computes the same{why}. Use "
            "sizes that divide dims of the large variables, give a LayoutMap, or use DataParallel"
        )

    def __str__(self) -> str:
        return self.show()

    def show(self, width: int = 160) -> str:
        """Tables of text: variables with their reasons, totals of a device, collectives of a step."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.axes)
        head = ("variable", "shape", "layout", "bytes per device", "why")
        rows = [(r.path, str(r.shape), r.layout.in_words, f"{r.bytes_per_device:,}", r.reason) for r in self.rows]
        title = f"{self.name} on {sizes}: {self.sharded_fraction:.1%} of its bytes sharded"
        variables = titled(title, (head, *rows), (3,), width)
        zero = f", zero={self.zero}" if self.zero else ""
        totals = titled(f"each device{zero}", (("what", "bytes"), *self.totals()), (1,), width)
        sent = (("collective", "axes", "count", "bytes per device"), *self.traffic())
        traffic = titled(f"one training step of {self.batch_in_words}", sent, (2, 3), width)
        note = f"the collectives are an estimate: {self.estimated}" if self.estimated else ""
        replicas = "" if self.replicas is None else self.replicas.in_words
        return "".join(f"{part}\n" for part in (variables, totals, traffic, note, replicas, self.idle) if part)

    def _repr_svg_(self) -> str | None:
        return names.shown(self, "svg")

    def _repr_html_(self) -> str | None:
        return names.shown(self, "html")

    def totals(self) -> list[tuple[str, str]]:
        """(what, bytes) of the device that holds most, as text."""
        parts = (
            ("variables", self.bytes_per_device),
            ("gradients", self.gradient_bytes_per_device),
            (f"slots of {self.optimizer}", self.slot_bytes_per_device),
            ("activations (estimate)", self.activation_bytes_per_device),
        )
        total = sum(size for _, size in parts)
        host = [("slots in host memory", f"{self.host_bytes_per_device:,}")] if self.host_bytes_per_device else []
        return [*((name, f"{size:,}") for name, size in parts), (f"total ({size_text(total)})", f"{total:,}"), *host]

    def traffic(self) -> list[tuple[str, ...]]:
        """(collective, axes, count, bytes per device) of a step, as text; their sum last."""
        kinds = dict.fromkeys((event.op, event.axes) for event in self.predicted.events)
        out = []
        for op, axes in kinds:
            part = Ledger([e for e in self.predicted.events if (e.op, e.axes) == (op, axes)])
            out.append((op, ", ".join(axes), f"{part.count():,}", f"{part.bytes():,.0f}"))
        return [*out, ("total", "", f"{self.predicted.count():,}", f"{self.predicted.bytes():,.0f}")]


def to_follow(facts: Facts, mesh: Mesh, axes: Axes) -> list[Reach]:
    """The reaches that are to be followed to their end before a plan is chosen.

    What has spread makes no pair. Where else it arrives matters to pairs that meet its source whole, and not even to
    these where the source is in a pair by then: the row that it is comes before all that its outputs reach.
    """
    ended = [reach for reach in facts.reaches if not reach.is_whole]
    if not ended:
        return []
    chooser = Chooser(facts, mesh, axes)
    joined = pairs(facts, [_without_idle_axes(choice.layout, mesh) for choice in chooser.choose()])
    paired = chooser.paired & {k for row, columns in joined.items() for k in (row, *columns)}
    return [reach for reach in ended if reach.source not in paired]


# (layouts of the variables, path of a layer -> axes of ranks that work with all that it gives, path of a stack -> how
# many of its kernels have a weight for a row) -> what was seen of a step; or why that is to be estimated.
Rehearse = Callable[[list[Layout], dict[str, Axes], dict[str, float]], Rehearsed | str]


def make_plan(
    facts: Facts,
    strategy: Strategy,
    axes: Axes,
    rules: LayoutMap | None,
    *,
    batch: int,
    sequence: int,
    rehearse: Rehearse,
    lengths: frozenset[int] = frozenset(),
) -> Plan:
    """A plan from facts: by the rules of a LayoutMap, or, without one, chosen.

    Args:
        strategy: the mesh, the data axes, and how states and activations are laid out. Its rule is not asked.
        axes: the axes that may cut variables, where they are chosen.
        rehearse: gives what layers send; where it gives none, closed forms do.
        lengths: of the sequences that context axes cut.

    Raises:
        LayoutError: everything about the rules that does not fit the model, together.
    """
    mesh, data_axes = strategy.mesh, strategy.data_axes
    is_found = rules is None
    if rules is None:
        experts = tuple(axis for axis in strategy.expert_axes if mesh.axis_size(axis) > 1)
        choices = Chooser(facts, mesh, axes, experts).choose()
        rules = LayoutMap(
            mesh, {v.path: c.layout for v, c in zip(facts.variables, choices, strict=True) if c.layout.dims}
        )
    else:
        choices = _ruled(facts, rules)
    layouts = [_without_idle_axes(choice.layout, mesh) for choice in choices]
    slots = facts.slots or [0] * len(facts.variables)
    dispatches = strategy.experts == "dispatch"
    step = Workload(mesh, data_axes, batch, sequence, strategy.context_axes, lengths, dispatches)
    found = zip(facts.layers, roles(facts, layouts), strict=True)
    shared = {layer.path: role.meets for layer, role in found if role.meets}
    weighed = {stack.path: stack.chosen for stack in facts.stacks if stack.chosen is not None}
    seen = rehearse(layouts, shared if is_found else {}, weighed)
    of_layers, kept, estimated = (None, None, seen) if isinstance(seen, str) else (seen.sent, seen.kept, "")

    def laid(one: Strategy) -> tuple[tuple[PlanRow, ...], Ledger]:
        rows = tuple(_row(*found, one) for found in zip(facts.variables, choices, slots, strict=True))
        return rows, predict(facts, layouts, step, [row.layouts for row in rows], of_layers)

    def held_and_sent(one: Strategy) -> tuple[int, Ledger]:
        rows, sent = laid(one)
        held = sum(r.bytes_per_device + r.gradient_bytes_per_device + r.slot_bytes_per_device for r in rows)
        return held, sent

    rows, predicted = laid(strategy)
    estimated = estimated or routed(predicted)
    return Plan(
        name=facts.name,
        mesh=mesh,
        data_axes=data_axes,
        rows=rows,
        pairs=tuple(
            tuple(facts.layers[k].path for k in (*columns, row)) for row, columns in pairs(facts, layouts).items()
        ),
        predicted=predicted,
        layout_map=rules,
        batch=batch,
        sequence=sequence if facts.is_open else None,
        optimizer=facts.optimizer,
        zero=strategy.zero,
        activation_bytes_per_device=activation_bytes(facts, layouts, step) if kept is None else kept,
        shared=tuple(shared.items()),
        estimated=estimated,
        context_axes=strategy.context_axes,
        offload=strategy.offload,
        replicas=compared(strategy, held_and_sent),
    )


def _row(variable: VariableFact, choice: Choice, slots: int, strategy: Strategy) -> PlanRow:
    # What is no weight (moving statistics, seeds) is spread over no data axes.
    spreading = strategy if variable.is_weight else replace(strategy, zero=0)
    three = spreading.with_rule(choice.layout).variable(variable.path, variable.shape)
    mesh = strategy.mesh
    return PlanRow(
        path=variable.path,
        shape=variable.shape,
        dtype=variable.dtype,
        trainable=variable.trainable,
        layouts=three,
        bytes=variable.bytes,
        bytes_per_device=local_bytes(variable, three.storage, mesh),
        gradient_bytes_per_device=local_bytes(variable, three.state, mesh) if variable.trainable else 0,
        slot_bytes_per_device=local_bytes(variable, three.state, mesh, slots),
        reason=choice.reason,
    )


def _without_idle_axes(layout: Layout, mesh: Mesh) -> Layout:
    return Layout(*(tuple(axis for axis in axes if mesh.axis_size(axis) > 1) for axes in layout.dims))


def _ruled(facts: Facts, rules: LayoutMap) -> list[Choice]:
    problems: list[str] = []
    found: list[tuple[Layout, str]] = []
    for variable in facts.variables:
        try:
            rule = rules.match(variable.path)
            layout = rules.layout_for(variable.path, variable.shape)
        except LayoutError as error:
            problems.append(str(error))
            rule, layout = None, Layout()
        found.append((layout, "replicated: no rule" if rule is None else f"rule {rule!r}"))
    try:
        rules.check_used([variable.path for variable in facts.variables])
    except LayoutError as error:
        problems.append(str(error))
    if len(problems) == 1:
        raise LayoutError(problems[0])
    if problems:
        raise LayoutError(f"{len(problems)} problems:\n- " + "\n- ".join(problems))
    layouts = [_without_idle_axes(layout, rules.mesh) for layout, _ in found]
    notes: dict[int, str] = {}
    for layer, role in zip(facts.layers, roles(facts, layouts), strict=True):
        if role.name != "whole":
            notes[layer.kernel] = f"{role.name}, {'paired' if role.paired else 'alone'}: "
    return [Choice(layout, notes.get(k, "") + why) for k, (layout, why) in enumerate(found)]
