"""Products that sum over shared dims."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import Bound, Call, Composed, binds
from unidist.backends.torch.sharded.bindings import rings
from unidist.backends.torch.sharded.bindings.dims import ints, nested_dims
from unidist.propagation.rules import contractions as rules
from unidist.propagation.rules.contractions import contraction

Tensor = torch.Tensor


def _product(call: Call, given: Any, terms: Any, out: Any, bias: int | None = None) -> Any:
    """The rule of a product. A dim that a carrier inside cuts is not cut by this space too."""
    if call.space.turns == "no":
        return partial(contraction, terms=terms, out=out, bias=bias)
    fixed = frozenset(term[dim] for x, term in zip(given, terms, strict=True) for dim in nested_dims(x))
    rings.check_product(call.space, given, terms)
    always = call.space.turns == "always"
    return partial(contraction, terms=terms, out=out, bias=bias, turns=call.space.turning, fixed=fixed, always=always)


@binds("matmul __matmul__ mm bmm mv dot")
def _matmul(call: Call) -> Bound | None:
    x, y = call.get(0, "input", "self"), call.get(1, "other", "mat2", "vec", "tensor")
    if not len(x.shape) or not len(y.shape) or call.kwargs.get("out_dtype") is not None or len(call.args) > 2:
        return None
    terms, out = rules.matmul(tuple(x.shape), tuple(y.shape))
    rule = _product(call, (x, y), terms, out)
    return Bound(rule, operands=(x, y), local=_matmul_of, nests=True)


def _matmul_of(decision: Any) -> Any:
    return lambda parts, args, kwargs: torch.matmul(parts[0], parts[1])


@binds("__rmatmul__")
def _rmatmul(call: Call) -> Composed:
    return Composed(lambda x, y: torch.matmul(y, x))


@binds("einsum", (torch,))
def _einsum(call: Call) -> Bound | None:
    text, tensors = call.args[0], call.args[1:]
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if not isinstance(text, str) or not all(isinstance(x, Tensor) for x in tensors):
        return None
    letters = rules.einsum(text, tuple(len(x.shape) for x in tensors))
    if letters is None or len({x.dtype for x in tensors}) > 1:  # which torch takes in some shapes
        return None
    return Bound(_product(call, tensors, *letters))


@binds("linear", (F,))
def _linear(call: Call) -> Bound | None:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    if not len(x.shape) or (bias is not None and len(bias.shape) != len(weight.shape) - 1):
        return None
    terms, out, added = rules.linear(len(x.shape), bias is not None, len(weight.shape))
    given = (x, weight) if bias is None else (x, weight, bias)
    return Bound(
        _product(call, given, terms, out, added),
        operands=given,
        local=lambda decision: lambda parts, args, kwargs: F.linear(*parts),
        nests=True,
    )


@binds("tensordot", (torch,))
def _tensordot(call: Call) -> Bound | None:
    x, y, dims = call.get(0, "a"), call.get(1, "b"), call.get(2, "dims", default=2)
    if isinstance(dims, int):
        over = tuple(range(len(x.shape) - dims, len(x.shape))), tuple(range(dims))
    elif isinstance(dims, (tuple, list)) and len(dims) == 2 and None not in (ints(dims[0]), ints(dims[1])):
        # In their order: each dim of x goes with one of y.
        over = (
            tuple(d % len(x.shape) for d in ints(dims[0]) or ()),
            tuple(d % len(y.shape) for d in ints(dims[1]) or ()),
        )
    else:
        return None
    left = tuple(f"k{over[0].index(d)}" if d in over[0] else f"x{d}" for d in range(len(x.shape)))
    right = tuple(f"k{over[1].index(d)}" if d in over[1] else f"y{d}" for d in range(len(y.shape)))
    out = tuple(letter for letter in (*left, *right) if letter[0] != "k")
    return Bound(
        _product(call, (x, y), (left, right), out),
        operands=(x, y),
        local=lambda decision: lambda parts, args, kwargs: torch.tensordot(parts[0], parts[1], over),
        nests=True,
    )


@binds("addmm addmv addbmm baddbmm addr")
def _added(call: Call) -> Composed | None:
    """A product with something added is a product and a sum, but where factors leave one of them out."""
    name = call.func.__name__
    if name in ("addbmm", "addr") or call.kwargs or len(call.args) != 3:
        return None
    return Composed(lambda added, x, y: torch.add(added, torch.matmul(x, y)))


@binds("outer ger", (torch, Tensor))
def _outer(call: Call) -> Composed | None:
    return Composed(lambda x, y: x.unsqueeze(1) * y.unsqueeze(0)) if len(call.args) == 2 else None
