"""Attention layers that count heads: where their projections are cut by heads, they must count this rank's.

An entry of the table is a class of keras_hub that reshapes, repeats or biases by a number of heads it was made with.
While its pair is in use, its call runs on a view of the layer in which these numbers are the local ones. Nothing here
is trusted: a pair is used only where pairs.py has found equal outputs and gradients with it.

Key and value heads that do not divide over the axis are whole on every rank, which then takes the heads that its
queries use; their gradients arrive partial from the ranks, so an I -> F stands behind the projection. Where its kernel
is cut in another way, as along the features of a head, its output is joined: S -> F.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from unidist.keras.calls import Call, Stage
from unidist.keras.layers import has_more_than_its_kernel
from unidist.keras.torch import context
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.tensor_parallel.applying import fan_out
from unidist.keras.torch.tensor_parallel.rules import Rule


@dataclass(frozen=True)
class Heads:
    """How a class of attention layers counts; names of its attributes.

    Attributes:
        output: the projection behind the attention: the row layer of its pair.
        divided: numbers that are divided by the number of ranks.
        query_heads, key_value_heads, groups: numbers of heads, and of query heads for each key head; "" where the
            class has none.
        key_value: the projections of key and value.
        cut: keyword arguments of the call that hold a value for each head, and the dim of the heads.
        own: weights that hold a value for each head, and the dim of the heads.
        within: layers that treat each head alike: each rank's part of their weights' gradients is summed.
        adapt: further changes of the view.
    """

    output: str
    divided: tuple[str, ...] = ()
    query_heads: str = ""
    key_value_heads: str = ""
    groups: str = ""
    key_value: tuple[str, ...] = ()
    cut: tuple[tuple[str, int], ...] = ()
    own: tuple[tuple[str, int], ...] = ()
    within: tuple[str, ...] = ()
    adapt: Callable[[Any, Any, Rule], None] | None = None


def _slopes(view: Any, layer: Any, row: Rule) -> None:
    """ALiBi's slopes are those of this rank's heads among all."""
    whole = layer._alibi_layer
    alibi = _view(whole)

    def _get_slopes(count: int) -> list[float]:
        place, parts = _place(row, context.frame())
        found: list[float] = whole._get_slopes(count * parts)
        return found[place * count : (place + 1) * count]

    alibi.__dict__["_get_slopes"] = _get_slopes
    view.__dict__["_alibi_layer"] = functools.partial(type(whole).call, alibi)


def _relative_bias(view: Any, layer: Any, row: Rule) -> None:
    """The relative bias of all heads is cut to this rank's; later layers of the stack take the cut one."""

    def compute_bias(*args: Any, **kwargs: Any) -> torch.Tensor:
        frame = context.frame()
        whole = layer.compute_bias(*args, **kwargs)
        return whole if frame is None else _own_part(row, frame, whole, 1)

    view.__dict__["compute_bias"] = compute_bias


_GROUPED = Heads(
    output="_output_dense",
    query_heads="num_query_heads",
    key_value_heads="num_key_value_heads",
    groups="num_key_value_groups",
    key_value=("_key_dense", "_value_dense"),
)
_GEMMA = Heads(
    output="output_dense",
    # hidden_dim: the scale of some sizes of Gemma is that of hidden_dim // num_query_heads.
    divided=("num_query_heads", "hidden_dim"),
    query_heads="num_query_heads",
    key_value_heads="num_key_value_heads",
    groups="num_key_value_groups",
    key_value=("key_dense", "value_dense"),
)
TABLE: dict[str, Heads] = {
    "LlamaAttention": _GROUPED,
    "QwenAttention": _GROUPED,
    "Qwen3Attention": replace(
        _GROUPED, divided=("num_query_heads",), within=("_query_dense_layer_norm", "_key_dense_layer_norm")
    ),
    "Phi3Attention": replace(_GROUPED, output="output_dense", key_value=("key_dense", "value_dense")),
    "CachedMixtralAttention": replace(_GROUPED, output="output_dense", key_value=("key_dense", "value_dense")),
    "CachedMistralAttention": Heads(
        output="_output_dense",
        query_heads="_num_query_heads",
        key_value_heads="_num_key_value_heads",
        groups="_num_key_value_groups",
        key_value=("_key_dense", "_value_dense"),
    ),
    "CachedGemmaAttention": _GEMMA,
    "CachedGemma3Attention": replace(_GEMMA, within=("query_norm", "key_norm")),
    "BloomAttention": Heads(output="_output_dense", divided=("num_heads",), adapt=_slopes),
    "FalconAttention": Heads(output="output_dense", divided=("num_heads",), cut=(("alibi", 1),)),
    "GPTNeoXAttention": Heads(output="_output_dense", divided=("num_heads", "hidden_dim")),
    "RoformerAttention": Heads(output="o_dense", divided=("heads",)),
    "EsmSelfAttention": Heads(output="o_dense", divided=("heads",)),
    "DisentangledSelfAttention": Heads(output="_output_dense", divided=("num_heads", "hidden_dim")),
    "GptOssAttention": Heads(
        output="output_dense",
        divided=("num_query_heads",),
        query_heads="num_query_heads",
        key_value_heads="num_key_value_heads",
        groups="num_key_value_groups",
        key_value=("key_dense", "value_dense"),
        own=(("sinks", 0),),
    ),
    "T5MultiHeadAttention": Heads(output="output_projector", divided=("num_heads", "inner_dim"), adapt=_relative_bias),
}


def install_heads(layer: Any, rules: list[Rule]) -> None:
    """Lets an attention layer of the table count by its pair. Called once all layers have their rules."""
    if not type(layer).__module__.startswith("keras_hub."):
        return
    heads = TABLE.get(type(layer).__name__)
    row = None if heads is None else _rule_of(getattr(layer, heads.output, None), rules)
    if heads is None or row is None or row.kind != "row":
        return
    parts = row.parts
    changed = {name: getattr(layer, name) // parts for name in heads.divided}
    if heads.key_value and not _count_key_values(layer, heads, row, rules, changed):
        return
    if changed or heads.adapt is not None:
        _install_view(layer, heads, row, changed)


def _count_key_values(layer: Any, heads: Heads, row: Rule, rules: list[Rule], changed: dict[str, int]) -> bool:
    """Puts the local numbers of key and value heads into `changed`; False where local heads cannot be grouped."""
    queries, keys = getattr(layer, heads.query_heads), getattr(layer, heads.key_value_heads)
    if queries % row.parts:
        return False
    local, groups = queries // row.parts, queries // keys
    projections = [getattr(layer, name) for name in heads.key_value]
    found = [_rule_of(projection, rules) for projection in projections]
    if keys % row.parts == 0 and all(rule is not None and rule.kind == "column" for rule in found):
        if heads.key_value_heads in vars(layer) and heads.divided:
            changed[heads.key_value_heads] = keys // row.parts
        return True
    if local % groups and groups % local:
        return False
    count = max(local // groups, 1)
    row.share = local, groups, count
    changed[heads.key_value_heads] = count
    changed[heads.groups] = local // count
    for projection, rule in zip(projections, found, strict=True):
        if rule is not None:
            rule.pairable = False
            rule.meets = row if rule.kind == "column" and rule.axes == row.axes else None
        _install_share(projection, rule, row, keys)
    return True


def _install_share(projection: Any, rule: Rule | None, row: Rule, keys: int) -> None:
    """The projection's output is cut to the heads that this rank's queries use, while the pair is in use."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        y = rest(*args, **kwargs)
        if y.is_meta or not row.is_paired(frame):
            return y
        if rule is None or rule.meets is None or has_more_than_its_kernel(projection):
            y = fan_out(frame, y, row.axes)
        return y.narrow(-2, *own_keys(row, frame, keys))

    around_call(projection, Stage.HEADS, inside)


def own_keys(row: Rule, frame: Frame, keys: int) -> tuple[int, int]:
    """Of so many key heads, the first that this rank works with while the pair is in use, and how many they are."""
    place, parts = _place(row, frame)
    if row.share is None:
        return place * (keys // parts), keys // parts
    local, groups, count = row.share
    return place * local // groups, count


def _install_view(layer: Any, heads: Heads, row: Rule, changed: dict[str, int]) -> None:
    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if not row.is_paired(frame):
            return rest(*args, **kwargs)
        # Made for each call: what is set on the layer in between counts. The layer itself, which virtual ranks share,
        # stays as it is.
        view = _view(layer)
        view.__dict__.update(changed)
        if heads.adapt is not None:
            heads.adapt(view, layer, row)
        for name, dim in heads.cut:
            kwargs[name] = _own_part(row, frame, kwargs[name], dim)
        with frame.reading(_fanned_weights(layer, heads, row, frame)):
            return type(layer).call(view, *args, **kwargs)

    around_call(layer, Stage.HEADS, inside)


def _fanned_weights(layer: Any, heads: Heads, row: Rule, frame: Frame) -> dict[int, torch.Tensor]:
    sublayers = [getattr(layer, name, None) for name in heads.within]
    weights = [v for sublayer in sublayers if sublayer is not None for v in sublayer.trainable_variables]
    found = {id(v): fan_out(frame, v._storage.whole(frame, differentiable=True), row.axes) for v in weights}
    for name, dim in heads.own:
        variable = getattr(layer, name)
        found[id(variable)] = _own_part(row, frame, variable._storage.whole(frame, differentiable=True), dim)
    return found


def _view(layer: Any) -> Any:
    """Another object that is the same layer: its weights and sublayers, but its own attributes."""
    view = object.__new__(type(layer))
    view.__dict__.update(vars(layer))
    return view


def _own_part(row: Rule, frame: Frame, x: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part of a replicated tensor, whose gradient then arrives partial."""
    place, parts = _place(row, frame)
    size = x.shape[dim] // parts
    return fan_out(frame, x, row.axes).narrow(dim, place * size, size)


def _place(row: Rule, frame: Frame | None) -> tuple[int, int]:
    """(this rank's place among the ranks that cut the heads, how many they are)."""
    if frame is None:
        return 0, 1
    group = frame.world.mesh.group(row.axes, frame.rank)
    return group.index, row.parts


def _rule_of(layer: Any, rules: list[Rule]) -> Rule | None:
    return next((rule for rule in rules if rule.layer is layer), None)
