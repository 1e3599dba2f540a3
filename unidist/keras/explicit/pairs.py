"""Pairs: which column outputs may stay sharded until a row layer takes them. Proven, never guessed.

Three checks on a few rows of the first batch, all ranks together:
1. Disturbance: one slice of a column layer's output is changed. The change must reach one row layer as exactly that
   slice, and nothing else: no other column or row layer, no output of the model. (A change, not a NaN: fused attention
   kernels swallow NaNs in queries and keys.)
2. Closure: a row layer is a candidate only if every column layer that reaches it reaches it so.
3. Equality: the model with the pair and the model without it give the same outputs and the same gradients. Layers of
   low precision compute in float32 for this, or rounding would be as large as what is looked for.
What fails any check is gathered, and the reason is kept (verdicts.py), the same on every rank.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist import events
from unidist.errors import UnidistError
from unidist.keras.calls import Call, Stage
from unidist.keras.compat import StatelessScope, tree
from unidist.keras.explicit import context
from unidist.keras.explicit.calls import around_call
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.rules import Rule
from unidist.keras.explicit.verdicts import KINDS, Verdict, agreed, unfit
from unidist.keras.known import keeps_numbers
from unidist.keras.layers import more_than_its_kernel
from unidist.keras.telling import listed

RELATIVE = 1e-4
ABSOLUTE = 1e-6
DIFFERENT = "outputs or gradients differ with the pair"
_BOLD = re.compile(r"\x1b\[\d*m")


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
    """An undisturbed run: what each row layer took and each column layer gave, what came out, and what each layer took
    that is watched: for its random numbers, or since it keeps numbers of what it takes."""

    watched: list[Any]
    keeping: frozenset[int]  # ids of those that keep
    seen: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    taken: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Reach:
    """Where a change of one column's output arrived."""

    rows: dict[Rule, str] = field(default_factory=dict)  # how, if not as its slice alone
    hits: dict[Rule, int] = field(default_factory=dict)  # in how many calls
    leaks: list[str] = field(default_factory=list)  # at what else it arrived
    odd: list[str] = field(default_factory=list)  # what else goes with no pair
    random: list[Any] = field(default_factory=list)

    @property
    def against(self) -> str:
        """What the outputs do that goes with no pair; "" where nothing."""
        if self.odd:
            return self.odd[0]
        if self.leaks:
            return f"{'also ' if self.rows else ''}reach {listed(self.leaks)}"
        if len(self.rows) > 1:
            return f"reach several row layers: {listed(repr(row.name) for row in self.rows)}"
        return next((f"reach {row.name!r} {how}" for row, how in self.rows.items() if how), "")


def prove(model: Any, rules: list[Rule], frame: Frame, x: Any) -> tuple[list[Pair], dict[int, Verdict]]:
    """The proven pairs, already switched on, and a verdict for each column and row layer, by its rule's id. All ranks
    of the mesh take part and agree.

    Args:
        model: a placed model whose rules are installed.
        rules: its rules.
        frame: this rank's frame.
        x: a few rows of input.
    """
    asked = [r for r in rules if r.kind in KINDS]
    reasons = {id(r): unfit(r) for r in asked}
    columns, rows = ([r for r in asked if r.kind == kind and not reasons[id(r)]] for kind in KINDS)
    if not columns or not rows:
        reasons |= {id(c): "there is no row layer to take its shards" for c in columns}
        reasons |= {id(r): "there is no column layer to give it shards" for r in rows}
        return [], _verdicts(asked, reasons, [])
    with events.for_purpose("proof of pairs"), frame.widened():
        frame.trial = frozenset()
        try:
            clean = _clean_run(model, frame, x)
            pairs = _closed(rows, {c: _disturbed(model, c, clean, frame, x) for c in columns}, reasons, frame)
            proven = _equal(model, pairs, frame, x, reasons)
        finally:
            frame.trial = None
    for pair in proven:
        for rule in pair.rules:
            rule.paired = True
    return proven, _verdicts(asked, reasons, proven)


def _verdicts(asked: list[Rule], reasons: dict[int, str], proven: list[Pair]) -> dict[int, Verdict]:
    partners = {id(pair.row): tuple(column.name for column in pair.columns) for pair in proven}
    partners |= {id(column): (pair.row.name,) for pair in proven for column in pair.columns}
    return {id(r): Verdict(r.name, r.kind, partners.get(id(r), ()), reasons[id(r)]) for r in asked}


def parted(pair: Pair) -> dict[int, Verdict] | None:
    """Parts a pair with a layer that computes in another way by now, as with a low-rank kernel: it gathers. The new
    verdicts of its layers; None where it holds."""
    changed = {id(rule): more for rule in pair.rules if (more := more_than_its_kernel(rule.layer))}
    if not changed:
        return None
    first = next(f"{rule.name!r} {changed[id(rule)]}" for rule in pair.rules if id(rule) in changed)
    out = {}
    for rule in pair.rules:
        rule.paired = False
        reason = f"it {changed[id(rule)]}" if id(rule) in changed else first
        out[id(rule)] = Verdict(rule.name, rule.kind, reason=reason)
    return out


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


# 1. disturbance -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _probing(frame: Frame, probe: Callable[[Rule, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    frame.probe = probe
    try:
        yield
    finally:
        frame.probe = None


def _clean_run(model: Any, frame: Frame, x: Any) -> _Clean:
    inside = list(model._flatten_layers(include_self=False))
    keeping = frozenset(id(layer) for layer in inside if keeps_numbers(layer))
    seeded = {id(layer) for layer in inside if getattr(layer, "seed_generator", None) is not None}
    clean = _Clean([layer for layer in inside if id(layer) in seeded | keeping], keeping)

    def record(rule: Rule, value: torch.Tensor) -> torch.Tensor:
        clean.seen.setdefault(id(rule), []).append(value.detach())
        return value

    def note(layer: Any, taken: list[torch.Tensor]) -> None:
        clean.taken.setdefault(id(layer), []).extend(taken)

    with _probing(frame, record), _watching(clean.watched, frame, note), torch.no_grad():
        clean.outputs = _floats(_forward(model, x))
    return clean


def _disturbed(model: Any, column: Rule, clean: _Clean, frame: Frame, x: Any) -> _Reach:
    reach = _Reach(odd=[] if id(column) in clean.seen else ["are not seen on the first rows"])
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
            reach.odd.append(f"change how {rule.name!r} is called")
            return value
        where = value != before[call]
        if bool(where.any()) and rule.kind == "column":
            # It takes the whole of what was changed.
            reach.leaks.append(repr(rule.name))
        elif bool(where.any()):
            slice_ = _slice_of(rule, value.shape[rule.in_dim], frame)
            sound = rule.axes == column.axes and _is_within(where, rule.in_dim, slice_)
            how = "in other slices than their own" if rule.axes == column.axes else "which other axes cut"
            reach.rows[rule] = reach.rows.get(rule) or ("" if sound else how)
            reach.hits[rule] = reach.hits.get(rule, 0) + 1
        # What goes on is clean: a change that arrives anywhere else came by another way.
        return before[call]

    calls: dict[int, list[bool]] = {}

    def note(layer: Any, taken: list[torch.Tensor]) -> None:
        known = clean.taken[id(layer)]
        hit = not any(t.shape == c.shape and bool((t == c).all()) for t in taken for c in known)
        if id(layer) in clean.keeping:
            reach.leaks += [f"what {layer.name!r} keeps of its inputs"] if hit else []
            return
        calls.setdefault(id(layer), []).append(hit)
        if hit:
            reach.random.append(layer)

    with _probing(frame, probe), _watching(clean.watched, frame, note), torch.no_grad():
        outputs = _floats(_forward(model, x))
    # A layer that draws for shards in one call and for whole tensors in another cannot draw apart and alike.
    mixed = [repr(layer.name) for layer in reach.random if not all(calls[id(layer)])]
    partly = [repr(row.name) for row, hits in reach.hits.items() if hits != len(clean.seen[id(row)])]
    reach.odd += [f"reach some calls of {listed(names)} and not others" for names in (mixed, partly) if names]
    if not is_close(outputs, clean.outputs):
        reach.leaks.append("the outputs of the model")
    if not reach.rows and not reach.leaks:
        reach.odd.append("reach no row layer")
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
def _watching(layers: list[Any], frame: Frame, note: Callable[[Any, list[torch.Tensor]], None]) -> Iterator[None]:
    """Calls note(layer, what it takes) at each call of one of the layers: those that a change reaches will work on
    shards. Random numbers must be drawn apart there, and what is kept of shards would be another number."""

    def before(layer: Any, args: Any) -> None:
        # Virtual ranks share the layer: each notes its own calls.
        if context.frame() is frame:
            note(layer, [t.detach() for t in _floats(args)])

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _floats(values: Any) -> list[torch.Tensor]:
    return [t for t in tree.flatten(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


# 2. closure -----------------------------------------------------------------------------------------------------------


def _closed(rows: list[Rule], reaches: dict[Rule, _Reach], reasons: dict[int, str], frame: Frame) -> list[Pair]:
    """The candidates on which all ranks agree; what speaks against the others goes into `reasons`."""
    found = {row: _meeting(row, reaches) for row in rows}
    own = {row: against for row, (_, against) in found.items()}
    against_rows = {**reasons, **{id(row): against for row, against in own.items()}}
    own |= {column: _against_column(reach, against_rows) for column, reach in reaches.items()}
    reasons |= zip(map(id, own), agreed(frame, list(own.values())), strict=True)
    return [pair for row, (pair, _) in found.items() if not reasons[id(row)]]


def _meeting(row: Rule, reaches: dict[Rule, _Reach]) -> tuple[Pair, str]:
    """What a row layer would be paired with, and what speaks against it."""
    feeders = [column for column, reach in reaches.items() if row in reach.rows]
    random = {id(m): m for c in feeders for m in reaches[c].random}
    unsound = [f"the outputs of {c.name!r} {reaches[c].against}" for c in feeders if reaches[c].against]
    against = next(iter(unsound), "") if feeders else "no shards of a column layer reach it"
    return Pair(row, feeders, list(random.values())), against


def _against_column(reach: _Reach, against_rows: dict[int, str]) -> str:
    if reach.against:
        return f"its outputs {reach.against}"
    (row,) = reach.rows
    against = against_rows[id(row)]
    return f"{row.name!r} is gathered: {against}" if against else ""


# 3. equality ----------------------------------------------------------------------------------------------------------


def _equal(model: Any, pairs: list[Pair], frame: Frame, x: Any, reasons: dict[int, str]) -> list[Pair]:
    """The pairs under which outputs and gradients stay what they are; all at once, else each with those before it."""
    if not pairs:
        return []
    reference = _outputs_and_gradients(model, frame, x)
    against = _against(model, pairs, frame, x, reference)
    if not against:
        return pairs
    proven: list[Pair] = []
    for pair in pairs:
        if len(pairs) > 1:
            against = _against(model, [*proven, pair], frame, x, reference)
        if not against:
            proven.append(pair)
        reasons |= {id(rule): against for rule in pair.rules if not reasons[id(rule)]}
    return proven


def _against(model: Any, pairs: list[Pair], frame: Frame, x: Any, reference: list[torch.Tensor]) -> str:
    """What all ranks have against pairs that are in use together; "" where nothing."""
    frame.trial = frozenset(id(rule) for pair in pairs for rule in pair.rules)
    try:
        against = "" if is_close(_outputs_and_gradients(model, frame, x), reference) else DIFFERENT
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        against = refused(error)
    finally:
        frame.trial = frozenset()
    return agreed(frame, [against])[0]


def refused(error: Exception) -> str:
    """What an error says against shards: they do not fit where the model wants the whole, and all ranks see it alike.

    Raises:
        UnidistError: it is one, and says something else.
    """
    if isinstance(error, UnidistError):
        raise error
    # Keras says the layer in the first line, in bold behind it what went wrong, then all arguments.
    said = [line for line in _BOLD.sub("", str(error)).split("\n") if line.strip()]
    return f"the shards do not fit where the model wants the whole: {' '.join(said[:2])}"


def _outputs_and_gradients(model: Any, frame: Frame, x: Any) -> list[torch.Tensor]:
    leaves = [v._storage.local(frame) for v in model.trainable_variables]
    with torch.enable_grad():
        outputs = _floats(_forward(model, x))
        sums = [_weighted(t) for t in outputs]
        total = sum(sums[1:], sums[0]) if sums else torch.zeros(())
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


def _forward(model: Any, x: Any) -> Any:
    """Outputs and added losses of the model in inference; whatever it writes into its variables is dropped."""
    with StatelessScope(collect_losses=True) as scope:
        outputs = model(x, training=False) if model._call_has_training_arg else model(x)
    return outputs, list(scope.losses)
