"""Attention in a space whose `turns` is "ring": keys and values of cut places go round."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from unidist import events
from unidist.backends.torch.sharded import ring
from unidist.backends.torch.sharded.binding import TABLE, Bound, Call
from unidist.backends.torch.sharded.calls import part_in
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import ShardedTensor, current, plain, wrap
from unidist.errors import CapabilityError
from unidist.propagation.layouts import Cut, State, chunked
from unidist.propagation.rules import layers as rules

_OTHERWISE = ", or choose attention='ulysses' or 'gather'"


def goes_round(space: Space, *others: Any) -> bool:
    """Returns whether keys or values go round: a space cuts their places."""
    return space.turns == "ring" and any(_places(space, x) is not None for x in others)


def _places(space: Space, x: Any) -> Cut | None:
    """Returns the cut of a tensor's places by a space."""
    cuts = x.spec.states if type(x) is ShardedTensor and x.spec.space is space else ()
    return next((cut for cut in cuts if isinstance(cut, Cut) and cut.dim == x.ndim + ring.PLACES), None)


def attention(
    space: Space,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention."""
    _check(query, key, value, attn_mask, is_causal, dropout_p)
    own, dim = _places(space, query), query.ndim + ring.PLACES
    keys = _places(space, key) or _places(space, value)
    assert keys is not None
    queries = own or chunked(dim, query.shape[dim], len(keys.sizes))
    wants: list[tuple[Any, State]] = [(query, queries), (key, keys), (value, keys)]
    if attn_mask is not None:
        wants.append((attn_mask, rules.masked(tuple(attn_mask.shape), dim, query.ndim, queries)))
    parts = [_part(space, x, want) for x, want in wants]
    if len({*queries.sizes}) > 1 or len({*keys.sizes}) > 1:  # carriers inside may be laid out otherwise elsewhere
        parts = list(map(plain, parts))
    why = next((x.why for x, _ in wants if type(x) is ShardedTensor and x.why), "")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    made = ring.Ring(space, queries.sizes, keys.sizes, is_causal, scale, events.purpose() or why)
    with nullcontext() if space.masks is None else space.masks.keeping(parts[3] if parts[3:] else None, *parts[:3]):
        out = ring.attention(made, *parts)
    result = wrap(out, space.spec_of((queries,), out.shape))
    result.why = why
    return result


def _part(space: Space, x: Any, want: State) -> torch.Tensor:
    x = current(x) if type(x) is ShardedTensor and x.aside is not None else x
    return part_in(space, x, (want,))


def _check(q: Any, k: Any, v: Any, mask: Any, causal: bool, dropout: float) -> None:
    """Raises CapabilityError for attention that is not served in a ring."""
    if dropout:
        why = f"dropout_p={dropout} drops weights of pairs of places, of which no rank has all. Set dropout=0"
    elif mask is not None and causal:
        why = "a mask and is_causal=True, of which torch takes one. Leave one out"
    elif q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or q.ndim != k.ndim:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        why = f"queries, keys and values of the shapes {shapes} have not the same rows. Expand them"
    elif q.ndim > 2 and q.shape[-3] % max(1, k.shape[-3]):
        why = f"{q.shape[-3]} heads of queries do not divide among {k.shape[-3]} of keys. Give numbers that divide"
    else:
        return
    raise CapabilityError(f"attention='ring': {why}{_OTHERWISE}")


def check_product(space: Space, given: Any, terms: Any) -> None:
    """Raises CapabilityError where two cut sequences meet in a product, which would gather one."""
    if space.turns != "ring":
        return
    carriers = [(x, term) for x, term in zip(given, terms, strict=True) if type(x) is ShardedTensor]
    states = [(term, state) for x, term in carriers if x.spec.space is space for state in x.spec.states]
    if len({term[state.dim] for term, state in states if isinstance(state, Cut)}) > 1:
        raise CapabilityError(
            "attention='ring': a product of tensors whose places are cut along different dims, as of queries with "
            "keys. Keys go round in torch's scaled_dot_product_attention alone, which layers of Keras call where "
            f"dropout=0 and no scores are asked for. Set that{_OTHERWISE}"
        )


def _of_heads(call: Call) -> Bound:
    """A rank's work in a ring, on heads that another axis cuts."""
    own, q, k, v, *mask = call.args

    def rule(states: Any, shapes: Any) -> Any:
        places = len(shapes[0]) + ring.PLACES
        return (one for one in rules.attention(states, shapes) if isinstance(one.out, Cut) and one.out.dim != places)

    def local(decision: Any) -> Any:
        return lambda parts, args, kwargs: ring.attention(own, *parts)

    return Bound(rule, operands=(q, k, v, *mask), local=local, nests=True)


TABLE[ring.attention] = _of_heads
