"""Norms of vectors: over a cut dim they are made of sums and extremes.

Those of matrices see their two dims whole.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from unidist.backends.torch.sharded.binding import Binding, Bound, Call, Composed, bind
from unidist.backends.torch.sharded.bindings.dims import ints
from unidist.backends.torch.sharded.bindings.reductions import cuts_of
from unidist.propagation.rules.dims import normal, reduction

Dims = tuple[int, ...]
_ROOT_OF_SQUARES = (None, "fro")
_NAMED = frozenset(("ord", "p", "dim", "axis", "keepdim", "dtype"))


def _norm(order: Any, of_matrices: bool | None) -> Binding:
    """Returns the binding of a norm.

    `order`: that which is meant where none is said; `of_matrices`: None where two dims make it one of matrices.
    """

    def binding(call: Call) -> Bound | Composed | None:
        given = {name for name, value in call.kwargs.items() if value is not None}
        if not 1 <= len(call.args) <= 4 or given - _NAMED or not _can(call.args[0]):
            return None
        x, p = call.args[0], call.get(1, "ord", "p", default=order)
        said = call.get(2, "dim", default=(-2, -1) if of_matrices else None)
        keeps = bool(call.get(3, "keepdim", default=False))
        dims = tuple(range(len(x.shape))) if said is None or said in ((), []) else _normal(len(x.shape), ints(said))
        if dims is None or (of_matrices is not False and not _goes_with(p, dims)):
            return None
        is_matrix = p not in _ROOT_OF_SQUARES and (len(dims) == 2 if of_matrices is None else of_matrices)
        if not cuts_of(x, dims):
            return Bound(partial(reduction, dims=dims, keepdim=keeps, linear=False))
        p = 2 if p in _ROOT_OF_SQUARES else p
        if is_matrix or isinstance(p, str) or not (p in (0, math.inf, -math.inf) or p >= 1):
            return None
        if math.isinf(p) and cuts_of(x, dims) > 1:
            return None
        return Composed(partial(vector_norm, p, dims, keeps))

    return binding


def _normal(ndim: int, dims: Dims | None) -> Dims | None:
    """None where torch says what is wrong with them."""
    if dims is None or not all(-ndim <= dim < ndim for dim in dims):
        return None
    found = normal(ndim, dims)
    return found if len(found) == len(dims) else None


def _goes_with(p: Any, dims: Dims) -> bool:
    """Names of orders are of matrices, numbers of vectors too."""
    return p is None or len(dims) == 2 or (len(dims) == 1 and not isinstance(p, str))


def _can(x: torch.Tensor) -> bool:
    """Anything else torch refuses, or it has an answer of its own."""
    return math.prod(x.shape) > 0 and (x.dtype.is_floating_point or x.dtype.is_complex)


def vector_norm(p: float, dims: Dims, keeps: bool, x: Any, /, *said: Any, dtype: Any = None, **rest: Any) -> Any:
    size = torch.abs(x if dtype is None else x.to(dtype))
    if math.isinf(p):
        return (torch.amax if p > 0 else torch.amin)(size, dims, keepdim=keeps)
    wide = size.to(torch.float32) if size.dtype.itemsize < 4 else size  # as torch, whose squares do not overflow
    return _root_of_sum(p, dims, keeps, wide).to(size.dtype)


def _root_of_sum(p: float, dims: Dims, keeps: bool, size: Any) -> Any:
    if p == 0:
        return torch.sum((size != 0).to(size.dtype), dims, keepdim=keeps)
    if p == 1:
        return torch.sum(size, dims, keepdim=keeps)
    total = torch.sum(size**p, dims, keepdim=keeps)
    none = total == 0  # torch's gradient is 0 there; that of a root is none
    return torch.where(none, total, torch.where(none, 1, total) ** (1 / p))


bind("vector_norm", _norm(2, False), (torch.linalg,))
bind("matrix_norm", _norm("fro", True), (torch.linalg,))
bind("norm", _norm(None, None), (torch.linalg,))
bind("norm", _norm("fro", False), (torch, torch.Tensor))
