"""Calls layers with cut weights: column, row and vocabulary rules move activations.

All else gathers its weights for the call, and their gradients flow back to the shards.

Source: Megatron-LM (Shoeybi et al., arXiv:1909.08053) for the column and row rules and the vocabulary-parallel lookup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import torch

from unidist import events
from unidist.algebra import Axes, Layout, Sharding
from unidist.backends.torch.sharded import wrap
from unidist.keras.layer_facts import stack_of
from unidist.keras.layers import has_more_than_its_kernel
from unidist.keras.patching.compat import ops, set_keras_mask, to_torch_dtype
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.torch import features
from unidist.keras.torch.activation_redistribute import WHOLE, cut_dim, fanned, move, partial
from unidist.keras.torch.carrying import space_amid
from unidist.keras.torch.context import Frame, around_call, infers_shapes
from unidist.keras.torch.layers import sequence
from unidist.keras.torch.layers.rules import DISPATCH, Rule, by_rules, cut_variables, make_rule
from unidist.keras.torch.layers.sending import balanced

# On a layer: its rule.
_RULE = "_unidist_rule"
# The rules of layers of one kernel, which a layer may have more than for now.
_OF_A_KERNEL = ("column", "row", "vocabulary")
# On a layer of whose outputs ranks share the whole: what takes that off again.
_SHARES = "_unidist_shares"
# Activations that treat each element alone: they may run on a shard of the features.
ELEMENTWISE = frozenset(
    [
        *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "swish", "tanh", "sigmoid"),
        *("hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "softplus", "softsign", "exponential", "mish"),
        *("log_sigmoid", "tanh_shrink", "soft_shrink", "hard_shrink", "squareplus", "threshold", "sparse_plus"),
    ]
)


def given_rule(layer: Any) -> Rule | None:
    """The rule that a layer is called by from now on. Models that share the layer share it."""
    rule, known = make_rule(layer), vars(layer).get(_RULE)
    if rule is None or (known is not None and _what(known) == _what(rule)):
        return None if rule is None else known
    install_rule(rule)
    object.__setattr__(layer, _RULE, rule)
    return rule


def _what(rule: Rule) -> tuple[Any, ...]:
    return rule.kind, rule.axes, rule.dim, rule.in_dim, rule.out_dim, rule.reason, id(rule.world)


def install_rule(rule: Rule) -> None:
    """Lets the layer be called by its rule wherever a rank is at work."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if infers_shapes():
            return rest(*args, **kwargs)
        with events.for_purpose(rule.name):
            return _way(rule, frame)(rule, frame, rest, *args, **kwargs)

    around_call(rule.layer, Stage.RULE, inside)
    if rule.kind == "row":
        # Keras would refuse a shard of the features; the product itself checks their number.
        given = rule.layer.input_spec
        rule.layer.input_spec = given and keras.layers.InputSpec(ndim=given.ndim, min_ndim=given.min_ndim)


def _way(rule: Rule, frame: Frame) -> Callable[..., Any]:
    """Returns how a layer is called now."""
    if not rule.is_at_home(frame):
        return _gather
    if rule.kind in _OF_A_KERNEL and has_more_than_its_kernel(rule.layer):
        return _by_rules if by_rules(rule) else _gather
    return _APPLY[rule.kind]


def share(layer: Any, axes: Axes) -> None:
    """Lets ranks work apart with all that a layer gives, as attention does with keys of few heads.

    It is joined, and the gradients of all ranks are summed.
    """
    if _SHARES not in vars(layer):
        object.__setattr__(layer, _SHARES, install_share(layer, axes))


def install_share(layer: Any, axes: Axes) -> Callable[[], None]:
    """Returns what takes it off again."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        y = rest(*args, **kwargs)
        with events.for_purpose(layer.path or layer.name):
            return y if infers_shapes() else features.shared(frame, y, axes)

    return around_call(layer, Stage.SHARED, inside)


def _whole_shape(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[dim] = size
    return tuple(shape)


def _shard(frame: Frame, variable: Any, dim: int, axes: Axes) -> torch.Tensor:
    """A variable cut along a dim over `axes` and whole elsewhere, whatever its storage is."""
    storage = variable._storage
    held, wanted = storage.layout, cut_dim(len(storage.sharding.shape), dim, axes)
    if held == wanted:
        return variable.local(frame)  # type: ignore[no-any-return]
    fanned = tuple(a for a in held.sharded_axes if a in frame.world.data_axes)
    target = storage.sharding.with_layout(Layout(*wanted.dims, fanout=fanned))
    return variable._maybe_autocast(  # type: ignore[no-any-return]
        frame.world.backend.redistribute(storage.local(frame), storage.sharding, target)
    )


def _column(rule: Rule, frame: Frame, rest: Call, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Kernel cut by its outputs: I -> F (nothing forward, all_reduce backward); the output is sharded."""
    layer = rule.layer
    if isinstance(layer, keras.layers.Embedding):
        return _embedding_column(rule, frame, rest, inputs, *args, **kwargs)
    x = features.fanned_out(frame, inputs, rule.axes)
    y = _product(layer, x, _shard(frame, layer._kernel, rule.dim, rule.axes))
    if layer.bias is not None:
        y = ops.add(y, _bias_of_column(rule, frame, y.ndim))
    # An unknown activation sees all features.
    local = layer.activation is None or activation_name(layer.activation) in ELEMENTWISE
    if local and layer.activation is not None:
        y = layer.activation(y)
    y = features.given(frame, y, rule.out_dim, layer._kernel.shape[rule.dim], rule.axes)
    if layer.activity_regularizer is not None:
        y = features.whole(y)
    return y if local else layer.activation(y)


def _row(rule: Rule, frame: Frame, rest: Call, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes with a kernel cut by its inputs: the product is partial, P -> I, or P -> S.

    P -> I is an all_reduce forward, and nothing backward.
    """
    layer = rule.layer
    rule.note_taken(features.comes_cut(frame, inputs, rule.in_dim, rule.axes))
    inputs = features.taken(frame, inputs, rule.in_dim, rule.axes)
    y = _product(layer, inputs, _shard(frame, layer._kernel, rule.dim, rule.axes))
    y = _joined(rule, frame, y, tuple(y.shape), partial(rule.axes))
    if layer.bias is not None:
        y = ops.add(y, _whole(frame, layer.bias))
    return y if layer.activation is None else layer.activation(y)


def _joined(rule: Rule, frame: Frame, y: torch.Tensor, shape: tuple[int, ...], src: Layout) -> torch.Tensor:
    """Joins the ranks' tensors: on every rank, or of sequences each rank's part of it."""
    if rule.in_parts and sequence.can_be_cut(frame, shape, rule.axes):
        return sequence.cut(frame, y, shape, src, rule.axes)
    return move(frame, y, shape, src, WHOLE)


def _product(layer: Any, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, keras.layers.EinsumDense):
        return ops.einsum(layer.equation, x, kernel)  # type: ignore[no-any-return]
    return ops.matmul(x, kernel)  # type: ignore[no-any-return]


def _bias_of_column(rule: Rule, frame: Frame, ndim: int) -> torch.Tensor:
    """Returns a column's bias: biases align with the output from the end.

    One that is the same all along the output's cut dim stays whole, and the ranks' gradients of it add up.
    """
    layer = rule.layer
    dim = layer.bias.ndim + (rule.out_dim % ndim - ndim)
    if dim >= 0 and layer.bias.shape[dim] == layer._kernel.shape[rule.dim]:
        return _shard(frame, layer.bias, dim, rule.axes)
    bias = _whole(frame, layer.bias)
    return move(frame, bias, tuple(bias.shape), WHOLE, fanned(rule.axes))


def activation_name(activation: Any) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _vocabulary(rule: Rule, frame: Frame, rest: Call, inputs: Any, reverse: bool = False) -> Any:
    """Table cut by its rows: each rank looks up what it holds, zeros elsewhere; P -> I or S."""
    layer = rule.layer
    if reverse:
        return _logits(rule, frame, inputs)
    table = _shard(frame, layer._embeddings, 0, rule.axes)
    start, length = Sharding(frame.world.mesh, Layout(rule.axes), layer._embeddings._storage.sharding.shape).region(
        frame.rank
    )[0]
    index = inputs.long() - start
    held = (index >= 0) & (index < length)
    if length:
        rows = torch.nn.functional.embedding(torch.where(held, index, 0), table)
        rows = torch.where(held.unsqueeze(-1), rows, 0.0)
    else:
        # A rank without rows still takes part, and its empty table gets its empty gradient.
        rows = table.new_zeros((*inputs.shape, table.shape[1])) + table.sum()
    whole = _joined(rule, frame, rows, tuple(rows.shape), partial(rule.axes))
    return _masked(layer, inputs, ops.cast(whole, dtype=layer.compute_dtype))


def _logits(rule: Rule, frame: Frame, inputs: torch.Tensor) -> Any:
    """A table cut by its rows in reverse: a column product, whose outputs are joined."""
    layer = rule.layer
    x = features.fanned_out(frame, inputs, rule.axes)
    if layer.tie_weights:
        kernel = ops.transpose(_shard(frame, layer._embeddings, 0, rule.axes))
    else:
        kernel = _shard(frame, layer.reverse_embeddings, 1, rule.axes)
    if layer.reverse_dtype is not None:
        x, kernel = ops.cast(x, layer.reverse_dtype), ops.cast(kernel, layer.reverse_dtype)
    y = ops.matmul(x, kernel)
    if layer.logit_soft_cap is not None:
        y = ops.multiply(ops.tanh(ops.divide(y, layer.logit_soft_cap)), layer.logit_soft_cap)
    whole = _whole_shape(y, -1, layer.input_dim)
    return move(frame, y, whole, cut_dim(y.ndim, -1, rule.axes), WHOLE)


def _embedding_column(rule: Rule, frame: Frame, rest: Call, inputs: Any, reverse: bool = False) -> Any:
    """Table cut by its features: a local lookup, then the features are joined."""
    if reverse:
        return _gather(rule, frame, rest, inputs, reverse=True)
    layer = rule.layer
    rows = torch.nn.functional.embedding(inputs.long(), _shard(frame, layer._embeddings, 1, rule.axes))
    whole = _whole_shape(rows, -1, layer._embeddings.shape[1])
    rows = _joined(rule, frame, rows, whole, cut_dim(rows.ndim, -1, rule.axes))
    return _masked(layer, inputs, ops.cast(rows, dtype=layer.compute_dtype))


def _masked(layer: Any, inputs: Any, rows: Any) -> Any:
    """A ReversibleEmbedding marks its output itself; of an Embedding Keras does it."""
    if isinstance(layer, keras.layers.ReversibleEmbedding):
        mask = keras.layers.Embedding.compute_mask(layer, inputs)
        if mask is not None:
            set_keras_mask(rows, mask)
    return rows


def _whole(frame: Frame, variable: Any) -> torch.Tensor:
    return variable.whole(frame)  # type: ignore[no-any-return]


def _stack(rule: Rule, frame: Frame, rest: Call, *args: Any, **kwargs: Any) -> Any:
    """Computes with this device's kernels of a stack, as experts are: what comes is cut as they are."""
    stack = {id(v) for v in stack_of(rule.layer)}
    values = {
        id(v): _as_carrier(frame, v, rule.axes) if id(v) in stack else _whole(frame, v)
        for v in cut_variables(rule.layer)
    }
    with frame.reading(values):
        return rest(*args, **kwargs)


def _sent(rule: Rule, frame: Frame, rest: Call, *args: Any, **kwargs: Any) -> Any:
    """Leaves it to what sends rows to kernels (experts.py); without that these are gathered."""
    if frame.world.rehearses and rule.chosen is not None:
        return _rehearsed(rule, frame, rest, *args, **kwargs)
    sends = DISPATCH in vars(rule.layer) and not frame.world.rehearses
    return (rest if sends else functools.partial(_gather, rule, frame, rest))(*args, **kwargs)


def _rehearsed(rule: Rule, frame: Frame, rest: Call, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Notes the rows that would be sent if each kernel had as many; all compute, without values."""
    stack = stack_of(rule.layer)
    wholes = {
        id(v): torch.empty(tuple(v.shape), dtype=to_torch_dtype(v.dtype), device="meta", requires_grad=v.trainable)
        for v in cut_variables(rule.layer)
    }
    with frame.reading(wholes):
        out: torch.Tensor = rest(x, **kwargs)
    balanced(frame, rule.axes, stack[0].shape[0], rule.chosen or 0.0, x, out)
    return out


def _by_rules(rule: Rule, frame: Frame, rest: Call, *args: Any, **kwargs: Any) -> Any:
    """The layer's own operations, with carriers of its cut weights: each goes by its rule."""
    values = {id(v): _amid_rows(frame, _as_carrier(frame, v, rule.axes)) for v in cut_variables(rule.layer)}
    if rule.kind == "row":
        rule.note_taken(features.comes_cut(frame, args[0], rule.in_dim, rule.axes))
    with frame.reading(values):
        return rest(*args, **kwargs)


def _as_carrier(frame: Frame, variable: Any, axes: Axes) -> torch.Tensor:
    """A variable that `axes` cut along one dim, as a carrier; any other gathered."""
    dims = [dim for dim, own in enumerate(variable._storage.layout.dims) if own == axes]
    if len(dims) != 1:
        return _whole(frame, variable)
    shard = _shard(frame, variable, dims[0], axes)
    return features.given(frame, shard, dims[0], variable.shape[dims[0]], axes)


def _amid_rows(frame: Frame, x: torch.Tensor) -> torch.Tensor:
    """Carries a weight amid the rows of all shards: what rounds it rounds the sum of its gradients."""
    space = space_amid(frame)
    return x if space is None else wrap(x, space.whole(x.shape))


def _gather(rule: Rule, frame: Frame, rest: Call, *args: Any, **kwargs: Any) -> Any:
    """The layer's own sharded weights are gathered once for the call; gradients go back as shards."""
    with frame.reading({id(v): v.whole(frame) for v in cut_variables(rule.layer)}):
        return rest(*args, **kwargs)


_APPLY: dict[str, Callable[..., Any]] = {
    "column": _column,
    "row": _row,
    "vocabulary": _vocabulary,
    "stack": _stack,
    "sent": _sent,
    "gather": _gather,
}
