"""Disturbing: where a change of one slice of a column layer's output arrives, on a few rows of a batch.

The model is run once as it is, and for each column layer with a few changes: of one slice, and of all but this slice,
each in both directions. What looks at single features in steps (`x[:, :1] > 0`) need not notice one of them; where a
model has nothing of the kind the first change is enough. Of a graph of Keras's own layers what
the change reaches is run again, and nothing else (graphs.py): in both runs a row layer goes on with what it took at
first, and a column layer with what it gave, so a change ends there. All ranks call the same layers: a place at which
layers send is called where the change reaches it on any rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist.errors import UnidistError
from unidist.keras.compat import StatelessScope, tree
from unidist.keras.graphs import Graph, Record, Replay
from unidist.keras.known import keeps_numbers
from unidist.keras.telling import in_words, listed
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame
from unidist.keras.torch.tensor_parallel.rules import Rule
from unidist.keras.torch.tensor_parallel.verdicts import agreed

RELATIVE = 1e-4
ABSOLUTE = 1e-6


@dataclass(frozen=True)
class Change:
    """Of a column's output the second rank's slice is changed, or all else; up where `sign` is 1, where -1 down."""

    inside: bool
    sign: float


CHANGES = tuple(Change(inside, sign) for inside in (True, False) for sign in (1.0, -1.0))


@dataclass
class _Clean:
    """An undisturbed run: what each row layer took and each column layer gave, what came out, and what each layer took
    that is watched: for its random numbers, or since it keeps numbers of what it takes."""

    watched: list[Any]
    keeping: frozenset[int]  # ids of those that keep
    seen: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    taken: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)  # of rules and of watched layers
    layers: dict[int, int] = field(default_factory=dict)  # ids of the layers of those

    def has_numbers_alone(self) -> bool:
        """Whether all of it is equal to itself. What is not differs in every run, wherever it is."""
        kept = [t for found in (*self.seen.values(), *self.taken.values()) for t in found]
        return all(bool((t == t).all()) for t in kept) and all(bool(t.isfinite().all()) for t in self.outputs)


@dataclass
class Reach:
    """Where a change of one column's output arrived."""

    rows: dict[Rule, str] = field(default_factory=dict)  # how, if not as its slice alone
    hits: dict[Rule, set[int]] = field(default_factory=dict)  # in which calls
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


class Trials:
    """Runs of a model on a rank, first as it is. A collective, as each `reach` is.

    Args:
        rules: all of the model's.

    Attributes:
        against: what the model raises on these rows; "" where it runs.
    """

    def __init__(self, model: Any, rules: list[Rule], frame: Frame, x: Any) -> None:
        self._model, self._frame, self._x = model, frame, x
        self._sending = {id(rule.layer) for rule in rules}
        self._record = Record()
        # Stored shards are fetched in an order, and let go: what a run keeps might be a part of them.
        self._graph = Graph.of(model) if frame.fetcher is None else None
        inside = list(model._flatten_layers(include_self=False))
        keeping = frozenset(id(layer) for layer in inside if keeps_numbers(layer))
        seeded = {id(layer) for layer in inside if getattr(layer, "seed_generator", None) is not None}
        self._clean = _Clean([layer for layer in inside if id(layer) in seeded | keeping], keeping)
        failed, graph = self._run_clean(), self._graph
        is_kept = graph is not None and graph.is_whole(self._record) and self._clean.has_numbers_alone()
        self.against, parted = agreed(frame, [failed, "" if is_kept else "no"])
        self._graph = None if parted else graph

    def reach(self, column: Rule) -> Reach:
        """Where a change of a column's output arrives."""
        place = None if self._graph is None else self._graph.place_of(column.layer)
        if self._graph is not None and place is not None:
            run = _Disturbed(self._clean, column, self._frame)
            changes = CHANGES[:1] if self._graph.is_continuous else CHANGES
            if all(self._is_replayed(run, self._graph, place, change) for change in changes):
                return run.result()
        run = _Disturbed(self._clean, column, self._frame)
        for change in CHANGES:
            run.make(self._model, self._x, change)
        return run.result()

    def _is_replayed(self, run: _Disturbed, graph: Graph, place: int, change: Change) -> bool:
        """Runs what the change reaches. A collective."""
        with graph.replaying(self._record, place, self._goes_on) as replay:
            run.make(self._model, self._x, change)
        return self._is_on_all(self._is_complete(run, graph, replay))

    def _run_clean(self) -> str:
        """What the model has against it."""
        clean, frame = self._clean, self._frame

        def record(rule: Rule, value: torch.Tensor) -> torch.Tensor:
            clean.seen.setdefault(id(rule), []).append(value.detach())
            clean.calls[id(rule)] += 1
            clean.layers[id(rule)] = id(rule.layer)
            return value

        def note(layer: Any, taken: list[torch.Tensor]) -> None:
            clean.taken.setdefault(id(layer), []).extend(taken)
            clean.calls[id(layer)] += 1
            clean.layers[id(layer)] = id(layer)

        with contextlib.ExitStack() as stack:
            stack.enter_context(_probing(frame, record))
            stack.enter_context(_watching(clean.watched, frame, note))
            stack.enter_context(torch.no_grad())
            if self._graph is not None:
                self._record = stack.enter_context(self._graph.recording())
            try:
                clean.outputs = floats(forward(self._model, self._x))
            except UnidistError:
                raise
            except Exception as error:
                return in_words(error)
        return ""

    def _goes_on(self, place: int, changed: bool) -> bool:
        """Where nothing is sent it goes on in any case: the ranks need not ask each other."""
        graph = self._graph
        return graph is None or not graph.inside[place] & self._sending or not self._is_on_all(not changed)

    def _is_on_all(self, it: bool) -> bool:
        """Whether it is so on all ranks. A collective."""
        return agreed(self._frame, ["" if it else "no"]) == [""]

    def _is_complete(self, run: _Disturbed, graph: Graph, replay: Replay) -> bool:
        """Whether what was called again is called as in the clean run, and nothing else."""
        inside = frozenset[int]().union(*(graph.inside[place] for place in replay.called))
        expected = {key: n for key, n in self._clean.calls.items() if self._clean.layers[key] in inside}
        return not replay.has_written and expected == dict(run.calls)


class _Disturbed:
    """Runs with a column's output changed, and what they showed.

    Attributes:
        calls: how often the last run called each rule and each watched layer.
    """

    def __init__(self, clean: _Clean, column: Rule, frame: Frame) -> None:
        self._clean, self._column, self._frame = clean, column, frame
        self._reach = Reach(odd=[] if id(column) in clean.seen else ["are not seen on the first rows"])
        self._hits: dict[int, dict[int, bool]] = {}
        self._leaves = False
        self._change = CHANGES[0]
        self.calls: Counter[int] = Counter()

    def make(self, model: Any, x: Any, change: Change) -> None:
        self._change, self.calls = change, Counter()
        watching = _watching(self._clean.watched, self._frame, self._note)
        with _probing(self._frame, self._probe), watching, torch.no_grad():
            outputs = floats(forward(model, x))
        self._leaves |= not is_close(outputs, self._clean.outputs)

    def result(self) -> Reach:
        reach, clean = self._reach, self._clean
        # A layer that draws for shards in one call and for whole tensors in another cannot draw apart and alike.
        mixed = [repr(layer.name) for layer in reach.random if not all(self._hits[id(layer)].values())]
        partly = [repr(row.name) for row, hits in reach.hits.items() if len(hits) != len(clean.seen[id(row)])]
        reach.odd += [f"reach some calls of {listed(names)} and not others" for names in (mixed, partly) if names]
        if self._leaves:
            reach.leaks.append("the outputs of the model")
        if not reach.rows and not reach.leaks:
            reach.odd.append("reach no row layer")
        return reach

    def _probe(self, rule: Rule, value: torch.Tensor) -> torch.Tensor:
        reach = self._reach
        # A shared layer is called several times: each call is compared with the same one of the clean run.
        call = self.calls[id(rule)]
        self.calls[id(rule)] += 1
        if rule is self._column:
            return self._changed(value)
        before = self._clean.seen.get(id(rule))
        if before is None:
            return value
        if call >= len(before) or value.shape != before[call].shape:
            self._keep(reach.odd, f"change how {rule.name!r} is called")
            return value
        where = value != before[call]
        if bool(where.any()) and rule.kind == "column":
            # It takes the whole of what was changed.
            self._keep(reach.leaks, repr(rule.name))
        elif bool(where.any()):
            self._note_row(rule, where, call)
        # What goes on is clean: a change that arrives anywhere else came by another way.
        return before[call]

    def _changed(self, value: torch.Tensor) -> torch.Tensor:
        dim, change = self._column.out_dim, self._change
        part = _slice_of(self._column, value.shape[dim], self._frame)
        moved = _moved(value, change.sign)
        onto, of = (value, moved) if change.inside else (moved, value)
        onto = onto.clone()
        onto.narrow(dim, *part).copy_(of.narrow(dim, *part))
        return onto

    def _note_row(self, rule: Rule, where: torch.Tensor, call: int) -> None:
        column, reach = self._column, self._reach
        slice_ = _slice_of(rule, where.shape[rule.in_dim], self._frame)
        apart = _is_within if self._change.inside else _is_beside
        sound = rule.axes == column.axes and apart(where, rule.in_dim, slice_)
        how = "in other slices than their own" if rule.axes == column.axes else "which other axes cut"
        reach.rows[rule] = reach.rows.get(rule) or ("" if sound else how)
        reach.hits.setdefault(rule, set()).add(call)

    def _note(self, layer: Any, taken: list[torch.Tensor]) -> None:
        call = self.calls[id(layer)]
        self.calls[id(layer)] += 1
        known = self._clean.taken[id(layer)]
        hit = not any(t.shape == c.shape and bool((t == c).all()) for t in taken for c in known)
        if id(layer) in self._clean.keeping:
            if hit:
                self._keep(self._reach.leaks, f"what {layer.name!r} keeps of its inputs")
            return
        hits = self._hits.setdefault(id(layer), {})
        hits[call] = hits.get(call, False) or hit
        if hit and not any(layer is one for one in self._reach.random):
            self._reach.random.append(layer)

    @staticmethod
    def _keep(said: list[str], words: str) -> None:
        """Each run might say it again."""
        if words not in said:
            said.append(words)


@contextlib.contextmanager
def _probing(frame: Frame, probe: Callable[[Rule, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    frame.probe = probe
    try:
        yield
    finally:
        frame.probe = None


def _moved(y: torch.Tensor, sign: float) -> torch.Tensor:
    """Values of y's scale in an order that no symmetry hides. One that is above y's is below it for the other sign."""
    scale = sign * (1.0 + float(y.abs().max()) if y.numel() else 1.0)
    ramp = torch.linspace(0.3, 1.7, max(y.numel(), 1), dtype=y.dtype, device=y.device)[: y.numel()]
    return (scale * torch.where(torch.arange(y.numel(), device=y.device) % 3 == 0, -ramp, ramp)).view(y.shape)


def _slice_of(rule: Rule, size: int, frame: Frame) -> tuple[int, int]:
    """The second rank's part of a dim: the first would hide a shift by nothing."""
    parts = frame.world.mesh.axis_size(rule.axes)
    step = -(-size // parts)
    return min(step, size), max(min(2 * step, size) - step, 0)


def _is_within(where: torch.Tensor, dim: int, part: tuple[int, int]) -> bool:
    outside = where.clone()
    outside.narrow(dim, *part).fill_(False)
    return not bool(outside.any())


def _is_beside(where: torch.Tensor, dim: int, part: tuple[int, int]) -> bool:
    return not bool(where.narrow(dim, *part).any())


@contextlib.contextmanager
def _watching(layers: list[Any], frame: Frame, note: Callable[[Any, list[torch.Tensor]], None]) -> Iterator[None]:
    """Calls note(layer, what it takes) at each call of one of the layers: those that a change reaches will work on
    shards. Random numbers must be drawn apart there, and what is kept of shards would be another number."""

    def before(layer: Any, args: Any) -> None:
        # Virtual ranks share the layer: each notes its own calls.
        if context.frame() is frame:
            note(layer, [t.detach() for t in floats(args)])

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def floats(values: Any) -> list[torch.Tensor]:
    """The tensors of a structure that hold real numbers."""
    return [t for t in tree.flatten(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def is_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether tensors are the same but for rounding."""
    return len(found) == len(wanted) and not any(map(difference, found, wanted))


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """How a tensor differs from another by more than rounding; "" where it does not."""
    if found.shape != wanted.shape:
        return f"has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    if not wanted.numel():
        return ""
    most, allowed = float((found - wanted).abs().max()), ABSOLUTE + _relative(wanted) * float(wanted.abs().max())
    return "" if most <= allowed else f"differs by {most:.2g}, where rounding makes {allowed:.1g}"


def _relative(t: torch.Tensor) -> float:
    return max(RELATIVE, 2 * torch.finfo(t.dtype).eps) if t.is_floating_point() else RELATIVE


def forward(model: Any, x: Any) -> Any:
    """Outputs and added losses of the model in inference; whatever it writes into its variables is dropped."""
    with StatelessScope(collect_losses=True) as scope:
        outputs = model(x, training=False) if model._call_has_training_arg else model(x)
    return outputs, list(scope.losses)
