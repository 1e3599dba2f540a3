"""Norms, attention, convolutions, pooling."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import Bound, Call, Composed, Local, bind, binds
from unidist.backends.torch.sharded.bindings import rings
from unidist.backends.torch.sharded.bindings.dims import along, nested_dims, over
from unidist.backends.torch.sharded.nested import PLAIN
from unidist.backends.torch.sharded.space import Space
from unidist.propagation.choosing import Decision
from unidist.propagation.layouts import Cut
from unidist.propagation.rules import layers as rules
from unidist.propagation.rules.dims import Mapping, kept

Tensor = torch.Tensor
MODULES = (F, torch)


@binds("layer_norm rms_norm group_norm", MODULES)
def _norm(call: Call) -> Bound | None:
    """A norm of groups of channels has all dims but rows."""
    x, shape = call.get(0, "input"), call.get(1, "normalized_shape")
    last = len(x.shape) - 1 if "group" in call.func.__name__ else 1 if isinstance(shape, int) else len(shape)
    tensors = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
    return Bound(partial(rules.normed, last=last)) if tensors[0] is x else None


@binds("batch_norm", (F,))
def _batch_norm(call: Call) -> Bound | None:
    """Statistics that are given leave rows independent; those of the batch leave channels so."""
    training, x = call.get(5, "training", default=False), call.get(0, "input")
    tensors = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
    if (
        training
        and len(tensors) > 1
        and any(call.get(k, n) is not None for k, n in ((1, "running_mean"), (2, "running_var")))
    ):
        return None  # they are written to
    if len(x.shape) < 2 or tensors[0] is not x:
        return None
    return Bound(partial(rules.by_channel, batch=not training))


@binds("cross_entropy nll_loss", (F,))
def _classified(call: Call) -> Bound | Composed | None:
    """Losses of classes. A mean is over the rows that are not ignored, each by its class's weight."""
    x, target, weight = (call.get(place, name) for place, name in enumerate(("input", "target", "weight")))
    old = any(call.kwargs.get(name) is not None for name in ("size_average", "reduce"))
    if old or len(x.shape) < 2 or len(call.args) > 3:
        return None
    how, indices = call.kwargs.get("reduction", "mean"), len(target.shape) < len(x.shape)
    if how == "none":
        operands = (x, target) if weight is None else (x, target, weight)
        return Bound(partial(rules.classified, indices=indices), operands=operands)
    return Composed(partial(_of_classes, call.func, how, indices)) if how in ("mean", "sum") else None


def _of_classes(
    func: Any, how: str, indices: bool, input: Any, target: Any, weight: Any = None, **kwargs: Any
) -> Tensor:
    each = func(input, target, weight, **{**kwargs, "reduction": "none"})
    if how == "sum" or not indices:
        return each.sum() if how == "sum" else each.mean()  # type: ignore[no-any-return]
    counts = target != kwargs.get("ignore_index", -100)
    if weight is not None:
        counts = torch.where(counts, weight[torch.where(counts, target, 0)], torch.zeros_like(weight[:1]))
    return each.sum() / counts.sum()  # type: ignore[no-any-return]


@binds("scaled_dot_product_attention", (F,))
def _attention(call: Call) -> Bound | Composed | None:
    q, k, v = (call.get(place, name) for place, name in enumerate(("query", "key", "value")))
    mask, causal = call.get(3, "attn_mask"), bool(call.get(5, "is_causal", default=False))
    if rings.goes_round(call.space, k, v):
        return Composed(partial(rings.attention, call.space))
    if call.get(4, "dropout_p", default=0.0) or len({len(one.shape) for one in (q, k, v)}) > 1:
        return None
    rule = partial(
        rules.attention,
        turns=call.space.turning,
        fixed=frozenset(nested_dims(q)),
        always=call.space.turns == "always",
    )
    return Bound(
        partial(_attention_rule, rule, causal),
        operands=(q, k, v) if mask is None else (q, k, v, mask),
        local=lambda decision: partial(_attended, causal, call.space),
        nests=True,
    )


def _attention_rule(rule: Any, causal: bool, states: Any, shapes: Any) -> Any:
    """A causal mask is made of the positions of all: cut ones need a mask of theirs."""
    for option in rule(states, shapes):
        positions = isinstance(option.out, Cut) and option.out.dim == len(shapes[0]) - 2
        if not (causal and positions):
            yield option


def _attended(causal: bool, space: Space, parts: list[Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    more = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    if len(args) > 6:
        more["scale"] = args[6]
    q, k, v, *mask = parts
    given = mask[0] if mask else None
    with nullcontext() if space.masks is None else space.masks.keeping(given, q, k, v):
        out: Tensor = F.scaled_dot_product_attention(q, k, v, given, is_causal=causal, **more)
    if not out.numel():  # torch drops what no head needs from its graph: the other ranks wait for it in backward
        for part in parts:
            if part.requires_grad:
                out = out + part.sum() * 0
    return out


def convolved(function: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Convolves one row as several: torch has no gradient of a single permuted filter for one image."""
    if type(x) in PLAIN and x.shape[0] == weight.shape[0] == 1:
        weight = weight.contiguous()
    return function(x, weight, *args, **kwargs)


def _convolution(spatial: int, transposed: bool, function: Any) -> Any:
    def local(decision: Decision) -> Local:
        def run(parts: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rest = {name: value for name, value in kwargs.items() if name not in ("input", "weight", "bias")}
            return convolved(function, parts[0], parts[1], parts[2] if len(parts) > 2 else None, *args[3:], **rest)

        return run

    def binding(call: Call) -> Bound | None:
        x, w, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
        if len(x.shape) != spatial + 2:
            return None
        grouped = call.get(6, "groups", default=1) != 1
        rule = partial(rules.convolution, transposed=transposed, grouped=grouped)
        return Bound(rule, operands=(x, w) if bias is None else (x, w, bias), local=local)

    return binding


for _n in (1, 2, 3):
    for _name, _transposed in ((f"conv{_n}d", False), (f"conv_transpose{_n}d", True)):
        bind(_name, _convolution(_n, _transposed, getattr(F, _name)), MODULES)


def _leading(last: int) -> Any:
    """All but the last dims are independent."""

    def mapper(call: Call) -> Mapping | None:
        n = len(call.get(0, "input").shape)
        return kept(n, range(n - last, n)) if n > last else None

    return mapper


def _channels(last: int) -> Any:
    """torch pools no empty channels, but empty batches."""
    return lambda call: range(len(call.get(0, "input").shape) - last - 1, len(call.get(0, "input").shape))


for _n in (1, 2, 3):
    _average = f"avg_pool{_n}d adaptive_avg_pool{_n}d"
    over(_average, _leading(_n), averages=True, filled=_channels(_n), places=MODULES)
    over(
        f"max_pool{_n}d max_pool{_n}d_with_indices lp_pool{_n}d "
        f"adaptive_max_pool{_n}d adaptive_max_pool{_n}d_with_indices",
        _leading(_n),
        linear=False,
        filled=_channels(_n),
        places=MODULES,
    )
over("pixel_shuffle pixel_unshuffle", _leading(3), filled=lambda c: range(len(c.args[0].shape)), places=MODULES)
over("normalize", along(2, 1), linear=False, places=(F,))
over(
    "interpolate upsample",
    lambda c: kept(len(c.args[0].shape), range(2, len(c.args[0].shape))),
    averages=True,
    filled=lambda c: (0, 1),
    places=(F,),
)
