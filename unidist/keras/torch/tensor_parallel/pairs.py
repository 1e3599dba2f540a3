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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist import events
from unidist.errors import UnidistError
from unidist.keras.calls import Call, Stage
from unidist.keras.layers import more_than_its_kernel
from unidist.keras.telling import in_words, listed
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.tensor_parallel.disturbing import Reach, Trials, difference, floats, forward
from unidist.keras.torch.tensor_parallel.rules import Rule
from unidist.keras.torch.tensor_parallel.verdicts import KINDS, Verdict, agreed, unfit


@dataclass(eq=False)
class Pair:
    """Column layers whose outputs meet in one row layer."""

    row: Rule
    columns: list[Rule] = field(default_factory=list)
    random: list[Any] = field(default_factory=list)

    @property
    def rules(self) -> list[Rule]:
        return [self.row, *self.columns]


def prove(model: Any, rules: list[Rule], frame: Frame, samples: list[Any]) -> tuple[list[Pair], dict[int, Verdict]]:
    """The proven pairs, not in use yet (`hold`), and a verdict for each column and row layer, by its rule's id. All
    ranks of the mesh take part and agree.

    Args:
        model: a placed model whose rules are installed.
        rules: its rules.
        frame: this rank's frame.
        samples: a few rows of input, and more of them where the model takes no such few.
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
            trials, x = _first_that_runs(model, rules, frame, samples)
            if trials.against:
                against = f"the model does not run on a few rows of its first batch: {trials.against}"
                return [], _verdicts(asked, {k: why or against for k, why in reasons.items()}, [])
            pairs = _closed(rows, {c: trials.reach(c) for c in columns}, reasons, frame)
            proven = _equal(model, pairs, frame, x, reasons)
        finally:
            frame.trial = None
    return proven, _verdicts(asked, reasons, proven)


def _first_that_runs(model: Any, rules: list[Rule], frame: Frame, samples: list[Any]) -> tuple[Trials, Any]:
    for x in samples:
        trials = Trials(model, rules, frame, x)
        if not trials.against:
            break
        if frame.fetcher is not None:
            frame.fetcher.release()
    return trials, x


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
    let_go(pair)
    for rule in pair.rules:
        reason = f"it {changed[id(rule)]}" if id(rule) in changed else first
        out[id(rule)] = Verdict(rule.name, rule.kind, reason=reason)
    return out


def without_draws(found: list[Pair], verdicts: dict[int, Verdict]) -> tuple[list[Pair], dict[int, Verdict]]:
    """The pairs in which no layer draws random numbers, and the verdicts so."""
    for pair in found:
        if pair.random:
            reason = f"exact_random=True: layer {pair.random[0].name!r} draws between them"
            verdicts |= {id(rule): Verdict(rule.name, rule.kind, reason=reason) for rule in pair.rules}
    return [pair for pair in found if not pair.random], verdicts


def hold(prover: Any, model: Any, pairs: list[Pair]) -> list[Callable[[], None]]:
    """From now on a pair is in use in calls of the innermost layer that has all of it, and in no others: a layer of it
    that a step calls by itself gathers. So does one that another trainer calls, whose own proof says where its model
    leads the shards. Gives what takes off again what watches these calls."""
    has = [(layer, {id(inner) for inner in layer._flatten_layers()}) for layer in model._flatten_layers()]
    held: dict[int, tuple[Any, list[Pair]]] = {}
    for pair in pairs:
        wanted = {id(rule.layer) for rule in pair.rules}
        holder, _ = min((one for one in has if wanted <= one[1]), key=lambda one: len(one[1]))
        held.setdefault(id(holder), (holder, []))[1].append(pair)
        for rule in pair.rules:
            rule.pairs.append(pair)
    return [_use_in_calls(holder, prover, frozenset(own)) for holder, own in held.values()]


def let_go(pair: Pair) -> None:
    """Parts a pair. Where one of its layers is in a pair of another trainer too, it stays in that one."""
    for rule in pair.rules:
        rule.pairs.remove(pair)


def _use_in_calls(layer: Any, prover: Any, pairs: frozenset[Pair]) -> Callable[[], None]:
    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if frame.prover is not prover:
            return rest(*args, **kwargs)
        with frame.using(pairs):
            return rest(*args, **kwargs)

    return around_call(layer, Stage.HOLDING, inside)


# 2. closure -----------------------------------------------------------------------------------------------------------


def _closed(rows: list[Rule], reaches: dict[Rule, Reach], reasons: dict[int, str], frame: Frame) -> list[Pair]:
    """The candidates on which all ranks agree; what speaks against the others goes into `reasons`."""
    found = {row: _meeting(row, reaches) for row in rows}
    own = {row: against for row, (_, against) in found.items()}
    against_rows = {**reasons, **{id(row): against for row, against in own.items()}}
    own |= {column: _against_column(reach, against_rows) for column, reach in reaches.items()}
    reasons |= zip(map(id, own), agreed(frame, list(own.values())), strict=True)
    return [pair for row, (pair, _) in found.items() if not reasons[id(row)]]


def _meeting(row: Rule, reaches: dict[Rule, Reach]) -> tuple[Pair, str]:
    """What a row layer would be paired with, and what speaks against it."""
    feeders = [column for column, reach in reaches.items() if row in reach.rows]
    random = {id(m): m for c in feeders for m in reaches[c].random}
    unsound = [f"the outputs of {c.name!r} {reaches[c].against}" for c in feeders if reaches[c].against]
    against = next(iter(unsound), "") if feeders else "no shards of a column layer reach it"
    return Pair(row, feeders, list(random.values())), against


def _against_column(reach: Reach, against_rows: dict[int, str]) -> str:
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


def _against(model: Any, pairs: list[Pair], frame: Frame, x: Any, reference: dict[str, torch.Tensor]) -> str:
    """What all ranks have against pairs that are in use together; "" where nothing."""
    frame.trial = frozenset(id(rule) for pair in pairs for rule in pair.rules)
    try:
        against = _difference(_outputs_and_gradients(model, frame, x), reference, pairs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        against = refused(error)
    finally:
        frame.trial = frozenset()
    return agreed(frame, [against])[0]


def _difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], pairs: list[Pair]) -> str:
    """The first that differs, and by how much; "" where all are the same but for rounding."""
    layers = listed(repr(rule.name) for pair in pairs for rule in (*pair.columns, pair.row))
    for name in wanted:
        how = difference(found[name], wanted[name]) if name in found else "is none"
        if how:
            return f"with shards between {layers} {name} {how}"
    return ""


def refused(error: Exception) -> str:
    """What an error says against shards: they do not fit where the model wants the whole, and all ranks see it alike.

    Raises:
        UnidistError: it is one, and says something else.
    """
    if isinstance(error, UnidistError):
        raise error
    return f"the shards do not fit where the model wants the whole: {in_words(error)}"


def _outputs_and_gradients(model: Any, frame: Frame, x: Any) -> dict[str, torch.Tensor]:
    """By what they are in words."""
    variables = model.trainable_variables
    leaves = [v._storage.local(frame) for v in variables]
    with torch.enable_grad():
        outputs = floats(forward(model, x))
        sums = [_weighted(t) for t in outputs]
        total = sum(sums[1:], sums[0]) if sums else torch.zeros(())
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
    of = {f"output {k} of the model": t.detach() for k, t in enumerate(outputs)}
    gradients = enumerate(zip(variables, grads, strict=False))
    return of | {f"the gradient of {v.path!r} (variable {k})": g for k, (v, g) in gradients if g is not None}


def _weighted(t: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=t.dtype, device=t.device)
    return (t.reshape(-1) * weights[: t.numel()]).sum()
