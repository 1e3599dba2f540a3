"""Pairs: which column outputs may stay sharded until a row layer takes them. Proven, never guessed.

Three checks on a few rows of the first batch, all ranks together:
1. Poison: one slice of a column layer's output is made NaN. It must reach one row layer as exactly that slice, and
   nothing else: no other layer with a rule, no output of the model.
2. Closure: a row layer is a candidate only if every column layer that reaches it reaches it so.
3. Equality: the model with the pair and the model without it give the same outputs and the same gradients.
What fails any check is gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from keras.src import tree
from keras.src.backend.common.stateless_scope import StatelessScope

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.errors import UnidistError
from unidist.keras.explicit import context
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.rules import ELEMENTWISE, Rule, activation_name

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
class _Reach:
    """Where one column's poison arrived."""

    rows: dict[int, bool] = field(default_factory=dict)  # id(row rule) -> only in the right slice
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
    rows = [r for r in rules if r.kind == "row"]
    if not columns or not rows:
        return []
    with events.for_purpose("proof of pairs"):
        frame.trial = frozenset()
        try:
            reaches = {id(c): _poisoned(model, c, columns, rows, frame, x) for c in columns}
            closed = [_closed(row, columns, reaches) for row in rows]
            agreed = _all_agree(frame, [pair is not None for pair in closed])
            pairs = [pair for pair, all_say_so in zip(closed, agreed, strict=True) if pair is not None and all_say_so]
            proven = _equal(model, pairs, frame, x)
        finally:
            frame.trial = None
    for pair in proven:
        for rule in pair.rules:
            rule.paired = True
    return proven


def _can_be_paired(rule: Rule) -> bool:
    activation = getattr(rule.layer, "activation", None)
    return hasattr(rule.layer, "_kernel") and (activation is None or activation_name(activation) in ELEMENTWISE)


# 1. poison ------------------------------------------------------------------------------------------------------------


def _poisoned(model: Any, column: Rule, columns: list[Rule], rows: list[Rule], frame: Frame, x: Any) -> _Reach:
    reach, calls = _Reach(), [0]

    def poison(rule: Rule, y: torch.Tensor) -> torch.Tensor:
        if rule is not column:
            return y
        calls[0] += 1
        y = y.clone()
        start, length = _slice_of(rule, y.shape[rule.out_dim], frame)
        y.narrow(rule.out_dim, start, length).fill_(float("nan"))
        return y

    def inspect(rule: Rule, value: torch.Tensor) -> torch.Tensor:
        nan = torch.isnan(value)
        if bool(nan.any()):
            size = value.shape[rule.in_dim]
            exact = rule.axes == column.axes and _is_exactly(nan, rule.in_dim, _slice_of(rule, size, frame))
            reach.rows[id(rule)] = exact and id(rule) not in reach.rows
        return torch.nan_to_num(value)

    frame.probe = lambda rule, value: (poison if rule.kind == "column" else inspect)(rule, value)
    try:
        with _watched_seeds(model, reach, frame):
            outputs = _forward(model, x)
    finally:
        frame.probe = None
    reach.leaked = calls[0] != 1 or any(bool(torch.isnan(t).any()) for t in _floats(outputs))
    return reach


def _slice_of(rule: Rule, size: int, frame: Frame) -> tuple[int, int]:
    """The second rank's part of a dim: the first would hide a shift by nothing."""
    parts = frame.world.mesh.axis_size(rule.axes)
    step = -(-size // parts)
    return min(step, size), max(min(2 * step, size) - step, 0)


def _is_exactly(nan: torch.Tensor, dim: int, where: tuple[int, int]) -> bool:
    rest = [d for d in range(nan.ndim) if d != dim % nan.ndim]
    some = nan.any(dim=rest) if rest else nan
    wanted = torch.zeros_like(some)
    wanted[where[0] : where[0] + where[1]] = True
    return bool((some == wanted).all())


@contextlib.contextmanager
def _watched_seeds(model: Any, reach: _Reach, frame: Frame) -> Iterator[None]:
    """Notes the layers with random numbers that see poison: between a pair they work on shards."""
    hooks = []
    for layer in model._flatten_layers(include_self=False):
        if getattr(layer, "seed_generator", None) is not None:

            def note(module: Any, args: Any) -> None:
                # Virtual ranks share the layer: each notes its own calls.
                if context.frame() is frame and any(bool(torch.isnan(t).any()) for t in _floats(args)):
                    reach.random.append(module)

            hooks.append(layer.register_forward_pre_hook(note))
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
        same = _close(_outputs_and_gradients(model, frame, x), reference)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, UnidistError):
            raise
        # Shards do not fit where the model wants the whole: the pair is refused and gathered. All ranks see it alike.
        same = False
    finally:
        frame.trial = frozenset()
    return _all_agree(frame, [same])[0]


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


def _close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return False
    return all(
        float((a - b).abs().max()) <= ABSOLUTE + RELATIVE * float(b.abs().max())
        for a, b in zip(found, wanted, strict=True)
        if b.numel()
    )


def _all_agree(frame: Frame, flags: list[bool]) -> list[bool]:
    """Which flags every rank of the mesh has set."""
    mesh = frame.world.mesh
    partial = Sharding(mesh, Layout(partial=dict.fromkeys(mesh.axis_names, "min")), (len(flags),))
    own = torch.tensor([1.0 if flag else 0.0 for flag in flags])
    return [bool(x) for x in frame.world.backend.redistribute(own, partial, partial.with_layout(Layout()))]


def _forward(model: Any, x: Any) -> Any:
    """The model in inference on a few rows; whatever it writes into its variables is dropped."""
    with StatelessScope(), torch.no_grad() if not torch.is_grad_enabled() else contextlib.nullcontext():
        return model(x, training=False) if model._call_has_training_arg else model(x)
