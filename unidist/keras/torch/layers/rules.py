"""Rules: find what a layer with sharded weights does, by their layouts (applying.py does it).

Source: Megatron-LM (Shoeybi et al., arXiv:1909.08053) for the column and row rules and the vocabulary-parallel lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from unidist.algebra import Axes
from unidist.keras.layer_facts import stack_of
from unidist.keras.layers import computes_as, keeps_to_its_kernel, more_than_its_kernel, own_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params.variables import DistributedVariable
from unidist.planner.predicting import along_kernels

# On a layer of stacked kernels: its Dispatch (experts.py).
DISPATCH = "_unidist_dispatch"


@dataclass(eq=False)
class Rule:
    """Says how one layer is called.

    Attributes:
        kind: "column", "row", "vocabulary", "stack", "sent" (rows go to the devices of a stack's kernels) or "gather".
        axes: the model axes that cut its kernel, along `dim` of it.
        in_dim, out_dim: the dims of its input (row) and output (column) that correspond to the cut.
        in_parts: sequence parallelism: what it sums over the ranks goes on as parts of the sequence.
        comes_cut: of a row: whether its inputs came cut in all calls so far; None: there was none.
        world: that its weights are on.
        reason: of "gather": why no other rule serves it.
        chosen: of "sent", where a step is rehearsed: for how many kernels a row has a weight, if they are dispatched.
    """

    layer: Any
    kind: str
    axes: Axes = ()
    dim: int = 0
    in_dim: int = -1
    out_dim: int = -1
    in_parts: bool = False
    comes_cut: bool | None = None
    world: Any = None
    reason: str = ""
    chosen: float | None = None

    def is_at_home(self, frame: Frame) -> bool:
        """Returns whether a rank works on the mesh of the weights: a model may call one on another mesh."""
        world = frame.world
        return self.world is world or (self.world.mesh, self.world.data_axes) == (world.mesh, world.data_axes)

    def note_taken(self, is_cut: bool) -> None:
        """Notes how the inputs of a row came in a call."""
        self.comes_cut = is_cut and self.comes_cut is not False

    @property
    def name(self) -> str:
        return self.layer.path or self.layer.name  # type: ignore[no-any-return]


def make_rule(layer: Any) -> Rule | None:
    """The rule of a layer, by the layouts of its own variables; None where nothing of it is sharded."""
    own = cut_variables(layer)
    if not own:
        return None
    found = _found(layer)
    rule = Rule(layer, "gather", reason=found) if isinstance(found, str) else found
    rule.world = own[0]._storage.world
    return rule


def told(rule: Rule) -> str:
    """Says what a layer with cut weights does, in a sentence."""
    if rule.kind != "gather" and (more := more_than_its_kernel(rule.layer)):
        what = f"{rule.kind}: its own operations go by rules, for it {more}"
        return what if by_rules(rule) else _gathered(f"it {more}")
    if rule.kind == "gather":
        return _gathered(rule.reason)
    if rule.kind == "vocabulary":
        return "vocabulary: each device looks up the entries that it holds"
    if rule.kind == "stack":
        return "stack: each device computes with its part of the kernels, each operation by its rule"
    if rule.kind == "sent":
        if DISPATCH in vars(rule.layer):
            return "stack: each device keeps its part of the kernels"
        return _gathered("the batch is cut over the axes of its kernels; with experts='dispatch' rows are sent to them")
    if rule.kind == "column":
        return "column: its outputs stay cut, until an operation needs all of them"
    return _OF_ROWS[rule.comes_cut]


def by_rules(rule: Rule) -> bool:
    """Returns whether a layer with more than its kernel computes with carriers of its weights."""
    return rule.kind in ("column", "row") and keeps_to_its_kernel(rule.layer)


def _gathered(reason: str) -> str:
    return f"gathered for each call: {reason}"


_OF_ROWS = {
    None: "row: takes its part of its inputs, which the first step shows to come cut or whole",
    True: "row: its inputs come cut",
    False: "row: its inputs come whole, and each device takes its part",
}


def cut_variables(layer: Any) -> list[Any]:
    """A layer's own variables that are cut."""
    return [v for v in [*layer._trainable_variables, *layer._non_trainable_variables] if is_sharded(v)]


def is_sharded(variable: Any) -> bool:
    return isinstance(variable, DistributedVariable) and variable._storage.is_sharded


def stack_axes(layer: Any) -> Axes:
    """Returns the axes that cut all that is cut of a layer's stack along its kernels alone; else ()."""
    return along_kernels(v._storage.layout for v in stack_of(layer) if is_sharded(v))


def sending_axes(layer: Any) -> Axes:
    """Returns the same where these axes cut the batch too; else ()."""
    axes = stack_axes(layer)
    return axes if axes and set(axes) <= set(_data_axes(layer)) else ()


def _data_axes(layer: Any) -> Axes:
    return cut_variables(layer)[0]._storage.world.data_axes  # type: ignore[no-any-return]


# finding a rule: or why there is none but to gather -------------------------------------------------------------------


def _found(layer: Any) -> Rule | str:
    finder = _FINDERS.get(computes_as(layer))
    if (axes := stack_axes(layer)) and not set(axes) & set(_data_axes(layer)):
        return Rule(layer, "stack", axes)
    if axes := sending_axes(layer):
        return Rule(layer, "sent", axes)
    if finder is None:
        name, base = type(layer).__name__, own_call(layer)
        what = f"computes otherwise than the {base} that it inherits from" if base else "has no rule for shards"
        return f"a {name} {what}"
    more = "" if keeps_to_its_kernel(layer) else more_than_its_kernel(layer)
    return f"it {more}" if more else finder(layer)


def _cut_of(kernel: Any) -> tuple[int, Axes] | str:
    """(dim, axes) of the one cut that model axes make."""
    if not is_sharded(kernel):
        return "its kernel is whole, and others of its weights are cut"
    layout, data = kernel._storage.layout, kernel._storage.world.data_axes
    cuts = [(dim, axes) for dim, axes in enumerate(layout.dims) if axes]
    if any(axis in data for _, axes in cuts for axis in axes):
        return "a data axis cuts its kernel"
    return cuts[0] if len(cuts) == 1 else f"{len(cuts)} dims of its kernel are cut"


def _find_dense(layer: Any) -> Rule | str:
    cut = _cut_of(layer._kernel)
    if isinstance(cut, str):
        return cut
    dim, axes = cut
    return Rule(layer, "column" if dim == 1 else "row", axes, dim, in_dim=-1, out_dim=-1)


def _find_einsum(layer: Any) -> Rule | str:
    cut = _cut_of(layer._kernel)
    if isinstance(cut, str):
        return cut
    dim, axes = cut
    no_rule = f"its equation {layer.equation!r} has no rule for shards"
    inputs, output = layer.equation.replace(" ", "").split("->")
    data, kernel = inputs.split(",")
    if "..." in kernel or any(len(set(t)) != len(t) for t in (data.replace(".", ""), kernel)):
        return no_rule
    letter = kernel[dim]
    if letter in output and letter not in data:
        return Rule(layer, "column", axes, dim, out_dim=_from_end(output, letter))
    if letter in data and letter not in output:
        return Rule(layer, "row", axes, dim, in_dim=_from_end(data, letter))
    return no_rule


def _from_end(term: str, letter: str) -> int:
    """The dim of a letter counted from the end, or from the start where "..." stands behind it."""
    if "..." not in term:
        return term.index(letter) - len(term)
    head, tail = term.split("...")
    return tail.index(letter) - len(tail) if letter in tail else head.index(letter)


def _find_embedding(layer: Any) -> Rule | str:
    cut = _cut_of(layer._embeddings)
    if isinstance(cut, str):
        return cut
    dim, axes = cut
    return Rule(layer, "vocabulary" if dim == 0 else "column", axes, dim, out_dim=-1)


_FINDERS: dict[type | None, Callable[[Any], Rule | str]] = {
    keras.layers.Dense: _find_dense,
    keras.layers.EinsumDense: _find_einsum,
    keras.layers.Embedding: _find_embedding,
    keras.layers.ReversibleEmbedding: _find_embedding,
}
