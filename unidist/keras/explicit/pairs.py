"""Pairs: which column outputs may stay sharded until a row layer takes them. Proven, never guessed.

Three checks on a few rows of the first batch, all ranks together:
1. Disturbance: one slice of a column layer's output is changed. The change must reach one row layer as exactly that
   slice, and nothing else: no other column or row layer, no output of the model. (A change, not a NaN: fused attention
   kernels swallow NaNs in queries and keys.)
2. Closure: a row layer is a candidate only if every column layer that reaches it reaches it so.
3. Equality: the model with the pair and the model without it give the same outputs and the same gradients. Layers of
   low precision compute in float32 for this, or rounding would be as large as what is looked for.
What fails any check is gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.errors import UnidistError
from unidist.keras.calls import Call, Stage
from unidist.keras.compat import StatelessScope, tree
from unidist.keras.explicit import context
from unidist.keras.explicit.calls import around_call
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.rules import Rule

RELATIVE = 1e-4
ABSOLUTE = 1e-6


@dataclass(eq=False)
class Pair:
    """Column layers whose outputs meet in one row layer."""

    row: Rule
    columns: list[Rule] = field(default_factory=list)
    random: list[Any] = field(default_factory=list)

    @property
    def rules(self) -> list[Rule]:
        return [self.row, *self.columns]


@dataclass
class _Clean:
    """An undisturbed run: what each row layer took and each column layer gave, what came out, and what each layer with
    random numbers took."""

    seen: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    seeded: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Reach:
    """Where a change of one column's output arrived."""

    rows: dict[int, bool] = field(default_factory=dict)  # id(row rule) -> in the right slice and nowhere else
    hits: dict[int, int] = field(default_factory=dict)  # id(row rule) -> in how many of its calls
    leaked: bool = False
    random: list[Any] = field(default_factory=list)


def prove(model: Any, rules: list[Rule], frame: Frame, x: Any) -> list[Pair]:
    """The proven pairs, already switched on. All ranks of the mesh take part and agree.

    Args:
        model: a placed model whose rules are installed.
        rules: its rules.
        frame: this rank's frame.
        x: a few rows of input.
    """
    columns = [r for r in rules if r.kind == "column" and _can_be_paired(r)]
    rows = [r for r in rules if r.kind == "row" and _can_be_paired(r)]
    if not columns or not rows:
        return []
    with events.for_purpose("proof of pairs"), frame.widened():
        frame.trial = frozenset()
        try:
            clean = _clean_run(model, frame, x)
            reaches = {id(c): _disturbed(model, c, clean, frame, x) for c in columns}
            closed = [_closed(row, columns, reaches) for row in rows]
            agreed = all_agree(frame, [pair is not None for pair in closed])
            pairs = [pair for pair, all_say_so in zip(closed, agreed, strict=True) if pair is not None and all_say_so]
            proven = _equal(model, pairs, frame, x)
        finally:
            frame.trial = None
    for pair in proven:
        for rule in pair.rules:
            rule.paired = True
    return proven


def hold(model: Any, pairs: list[Pair]) -> None:
    """From now on a pair is in use in calls of the innermost layer that has all of it, and in no others: a layer of it
    that a step calls by itself gathers."""
    has = [(layer, {id(inner) for inner in layer._flatten_layers()}) for layer in model._flatten_layers()]
    watched: set[int] = set()
    for pair in pairs:
        wanted = {id(rule.layer) for rule in pair.rules}
        holder, _ = min((one for one in has if wanted <= one[1]), key=lambda one: len(one[1]))
        for rule in pair.rules:
            rule.within = holder
        if id(holder) not in watched:
            watched.add(id(holder))
            _tell_calls(holder)


def _tell_calls(layer: Any) -> None:
    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        with frame.calling(layer):
            return rest(*args, **kwargs)

    around_call(layer, Stage.HOLDING, inside)


def _can_be_paired(rule: Rule) -> bool:
    """Whether its shards are of one size (all ranks then see alike whether they fit) and nothing else looks at them."""
    layer = rule.layer
    if not hasattr(layer, "_kernel") or layer.activity_regularizer is not None or not rule.pairable:
        return False
    return all(layer._kernel.shape[d] % rule.parts == 0 for d, a in enumerate(layer._kernel._place.layout.dims) if a)


# 1. disturbance -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _probing(frame: Frame, probe: Callable[[Rule, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    frame.probe = probe
    try:
        yield
    finally:
        frame.probe = None


def _clean_run(model: Any, frame: Frame, x: Any) -> _Clean:
    clean = _Clean()

    def record(rule: Rule, value: torch.Tensor) -> torch.Tensor:
        clean.seen.setdefault(id(rule), []).append(value.detach())
        return value

    def note(layer: Any, taken: list[torch.Tensor]) -> None:
        clean.seeded.setdefault(id(layer), []).extend(taken)

    with _probing(frame, record), _seeded_layers(model, frame, note), torch.no_grad():
        clean.outputs = _floats(_forward(model, x))
    return clean


def _disturbed(model: Any, column: Rule, clean: _Clean, frame: Frame, x: Any) -> _Reach:
    reach = _Reach(leaked=id(column) not in clean.seen)
    seen: dict[int, int] = {}

    def probe(rule: Rule, value: torch.Tensor) -> torch.Tensor:
        if rule is column:
            return _changed(value, rule.out_dim, _slice_of(rule, value.shape[rule.out_dim], frame))
        before = clean.seen.get(id(rule))
        if before is None:
            return value
        # A shared layer is called several times: each call is compared with the same one of the clean run.
        call = seen[id(rule)] = seen.get(id(rule), -1) + 1
        if call >= len(before) or value.shape != before[call].shape:
            reach.leaked = True
            return value
        where = value != before[call]
        if bool(where.any()) and rule.kind == "column":
            # It takes the whole of what was changed.
            reach.leaked = True
        elif bool(where.any()):
            slice_ = _slice_of(rule, value.shape[rule.in_dim], frame)
            sound = rule.axes == column.axes and _is_within(where, rule.in_dim, slice_)
            reach.rows[id(rule)] = sound and reach.rows.get(id(rule), True)
            reach.hits[id(rule)] = reach.hits.get(id(rule), 0) + 1
        # What goes on is clean: a change that arrives anywhere else came by another way.
        return before[call]

    calls: dict[int, list[bool]] = {}

    def note(layer: Any, taken: list[torch.Tensor]) -> None:
        known = clean.seeded[id(layer)]
        hit = not any(t.shape == c.shape and bool((t == c).all()) for t in taken for c in known)
        calls.setdefault(id(layer), []).append(hit)
        if hit:
            reach.random.append(layer)

    with _probing(frame, probe), _seeded_layers(model, frame, note), torch.no_grad():
        outputs = _floats(_forward(model, x))
    # A layer that draws for shards in one call and for whole tensors in another cannot draw apart and alike.
    mixed = any(any(hits) and not all(hits) for hits in calls.values())
    partly = any(hits != len(clean.seen[row]) for row, hits in reach.hits.items())
    reach.leaked = reach.leaked or mixed or partly or not is_close(outputs, clean.outputs)
    return reach


def _changed(y: torch.Tensor, dim: int, where: tuple[int, int]) -> torch.Tensor:
    """y with one slice replaced by values of its own scale in an order that no symmetry hides."""
    y = y.clone()
    part = y.narrow(dim, *where)
    scale = 1.0 + float(y.abs().max()) if y.numel() else 1.0
    ramp = torch.linspace(0.3, 1.7, max(part.numel(), 1), dtype=y.dtype, device=y.device)[: part.numel()]
    part.copy_(scale * torch.where(torch.arange(part.numel(), device=y.device) % 3 == 0, -ramp, ramp).view(part.shape))
    return y


def _slice_of(rule: Rule, size: int, frame: Frame) -> tuple[int, int]:
    """The second rank's part of a dim: the first would hide a shift by nothing."""
    parts = frame.world.mesh.axis_size(rule.axes)
    step = -(-size // parts)
    return min(step, size), max(min(2 * step, size) - step, 0)


def _is_within(where: torch.Tensor, dim: int, part: tuple[int, int]) -> bool:
    outside = where.clone()
    outside.narrow(dim, *part).fill_(False)
    return not bool(outside.any())


@contextlib.contextmanager
def _seeded_layers(model: Any, frame: Frame, note: Callable[[Any, list[torch.Tensor]], None]) -> Iterator[None]:
    """Calls note(layer, what it takes) at each call of a layer with random numbers: those that a change reaches will
    work on shards, and must draw apart."""

    def before(layer: Any, args: Any) -> None:
        # Virtual ranks share the layer: each notes its own calls.
        if context.frame() is frame:
            note(layer, [t.detach() for t in _floats(args)])

    seeded = [m for m in model._flatten_layers(include_self=False) if getattr(m, "seed_generator", None) is not None]
    hooks = [layer.register_forward_pre_hook(before) for layer in seeded]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _floats(values: Any) -> list[torch.Tensor]:
    return [t for t in tree.flatten(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


# 2. closure -----------------------------------------------------------------------------------------------------------


def _closed(row: Rule, columns: list[Rule], reaches: dict[int, _Reach]) -> Pair | None:
    feeders = [c for c in columns if id(row) in reaches[id(c)].rows]
    sound = all(
        len(reaches[id(c)].rows) == 1 and reaches[id(c)].rows[id(row)] and not reaches[id(c)].leaked for c in feeders
    )
    if not feeders or not sound:
        return None
    random = {id(m): m for c in feeders for m in reaches[id(c)].random}
    return Pair(row, feeders, list(random.values()))


# 3. equality ----------------------------------------------------------------------------------------------------------


def _equal(model: Any, pairs: list[Pair], frame: Frame, x: Any) -> list[Pair]:
    """The pairs under which outputs and gradients stay what they are; tried together, then one by one."""
    if not pairs:
        return []
    reference = _outputs_and_gradients(model, frame, x)
    if _holds(model, pairs, frame, x, reference):
        return pairs
    return [pair for pair in pairs if _holds(model, [pair], frame, x, reference)] if len(pairs) > 1 else []


def _holds(model: Any, pairs: list[Pair], frame: Frame, x: Any, reference: list[torch.Tensor]) -> bool:
    frame.trial = frozenset(id(rule) for pair in pairs for rule in pair.rules)
    try:
        same = is_close(_outputs_and_gradients(model, frame, x), reference)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, UnidistError):
            raise
        # Shards do not fit where the model wants the whole: the pair is refused and gathered. All ranks see it alike.
        same = False
    finally:
        frame.trial = frozenset()
    return all_agree(frame, [same])[0]


def _outputs_and_gradients(model: Any, frame: Frame, x: Any) -> list[torch.Tensor]:
    leaves = [v._place.local(frame) for v in model.trainable_variables]
    with torch.enable_grad():
        outputs = _floats(_forward(model, x))
        total = sum((_weighted(t) for t in outputs), torch.zeros(()))
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
    return [*(t.detach() for t in outputs), *(g for g in grads if g is not None)]


def _weighted(t: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=t.dtype, device=t.device)
    return (t.reshape(-1) * weights[: t.numel()]).sum()


def is_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether tensors are the same but for rounding."""
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return False
    return all(
        float((a - b).abs().max()) <= ABSOLUTE + _relative(b) * float(b.abs().max())
        for a, b in zip(found, wanted, strict=True)
        if b.numel()
    )


def _relative(t: torch.Tensor) -> float:
    return max(RELATIVE, 2 * torch.finfo(t.dtype).eps) if t.is_floating_point() else RELATIVE


def all_agree(frame: Frame, flags: list[bool]) -> list[bool]:
    """Which flags every rank of the mesh has set."""
    mesh = frame.world.mesh
    partial = Sharding(mesh, Layout(partial=dict.fromkeys(mesh.axis_names, "min")), (len(flags),))
    own = torch.tensor([1.0 if flag else 0.0 for flag in flags])
    return [bool(x) for x in frame.world.backend.redistribute(own, partial, partial.with_layout(Layout()))]


def _forward(model: Any, x: Any) -> Any:
    """Outputs and added losses of the model in inference; whatever it writes into its variables is dropped."""
    with StatelessScope(collect_losses=True) as scope:
        outputs = model(x, training=False) if model._call_has_training_arg else model(x)
    return outputs, list(scope.losses)
