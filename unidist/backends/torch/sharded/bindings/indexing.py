"""x[...] and x[...] = value; gather, scatter, embedding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import Binding, Bound, Call, Local, bind, binds
from unidist.propagation.choosing import Decision, Option
from unidist.propagation.layouts import PARTIAL, Cut, offset
from unidist.propagation.rules.dims import Mapping, kept, mapped, placed
from unidist.propagation.rules.elementwise import elementwise
from unidist.propagation.rules.indexing import along_dim, indexed_add, looked_up, scattered, taken, written

Tensor = torch.Tensor


class Index(NamedTuple):
    """An index of slices, numbers and new dims, with at most one tensor of places.

    Attributes:
        items: one for each dim and each new one.
        mapping: where dims go; None for those that are picked from.
        ndim: of the result.
        at: the dim of the result where those of the tensor begin.
        tensors: the tensor, if there is one.
    """

    items: tuple[Any, ...]
    mapping: Mapping
    ndim: int
    at: int
    tensors: tuple[Any, ...]


def _read(shape: torch.Size, index: Any) -> Index | None:
    items = index if isinstance(index, tuple) else (index,)
    if any(not _is_simple(item) for item in items):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > len(shape):
        return None
    dots = next((k for k, item in enumerate(items) if item is Ellipsis), len(items))
    rest = list(items[dots + 1 :])
    items = (*items[:dots], *[slice(None)] * (len(shape) - used), *rest)
    tensors = tuple(item for item in items if isinstance(item, Tensor))
    if (
        Ellipsis in [i for i in rest if i is Ellipsis]
        or len(tensors) > 1
        or (tensors and any(type(i) is int for i in items))
    ):
        return None
    mapping: list[int | None] = []
    dim = at = 0
    for item in items:
        if isinstance(item, Tensor):
            at, dim = dim, dim + len(item.shape)
            mapping.append(None)
        elif type(item) is int:
            mapping.append(None)
        else:
            if item is not None:
                mapping.append(dim if _is_all(item, shape[len(mapping)]) else None)
            dim += 1
    return Index(items, tuple(mapping), dim, at, tensors)


def _is_simple(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype in (torch.int64, torch.int32) and len(item.shape) > 0
    if isinstance(item, slice):
        return all(one is None or type(one) is int for one in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int


def _is_all(item: slice, n: int) -> bool:
    return item.indices(n) == (0, n, 1)


def _on_part(index: Index, part: Any) -> tuple[Any, ...]:
    """A slice that takes all of a dim takes all of a part."""
    found: list[Any] = []
    dim = 0
    for item in index.items:
        if item is None:
            found.append(None)
            continue
        whole = isinstance(item, slice) and index.mapping[dim] is not None
        found.append(slice(None) if whole else part if isinstance(item, Tensor) else item)
        dim += 1
    return tuple(found)


def _places_of(index: Index) -> Index:
    """Without its tensor, which a plan must not hold."""
    stand_in = torch.empty(0)
    return index._replace(tensors=(), items=tuple(stand_in if isinstance(i, Tensor) else i for i in index.items))


@binds("__getitem__", (Tensor,))
def _getitem(call: Call) -> Bound | None:
    x = call.args[0]
    index = _read(x.shape, call.args[1])
    if index is None or not isinstance(x, Tensor):
        return None
    kept_index = _places_of(index)

    def local(decision: Decision) -> Local:
        return lambda parts, args, kwargs: parts[0][_on_part(kept_index, parts[-1])]

    rule = partial(taken, mapping=index.mapping, at=index.at)
    return Bound(rule, operands=(x, *index.tensors), local=local, aliases=not index.tensors)


@binds("__setitem__", (Tensor,))
def _setitem(call: Call) -> Bound | None:
    x, at, value = call.args
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        alike = tuple(at.shape) == tuple(x.shape) and not (isinstance(value, Tensor) and len(value.shape))
        return Bound(partial(elementwise, linear="no")) if alike else None
    index = _read(x.shape, at)
    if index is None or index.tensors or (isinstance(value, Tensor) and len(value.shape) > index.ndim):
        return None
    tensor = isinstance(value, Tensor)
    if not tensor and not isinstance(value, (int, float, bool, complex)):
        return None

    def local(decision: Decision) -> Local:
        def run(parts: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            parts[0][_on_part(index, None)] = parts[1] if tensor else args[2]

        return run

    rule = partial(written if tensor else _number_written, mapping=index.mapping, ndim=index.ndim)
    return Bound(rule, operands=(x, value) if tensor else (x,), local=local)


def _number_written(states: Any, shapes: Any, mapping: Mapping, ndim: int) -> Any:
    """A number has no parts: each rank's summand would get all of it."""
    return () if PARTIAL in states else written(states, shapes, mapping, ndim)


@binds("index_select")
def _index_select(call: Call) -> Bound | None:
    x, dim, index = call.get(0, "input"), call.get(1, "dim"), call.get(2, "index")
    if not isinstance(dim, int) or not len(x.shape) or not len(index.shape):
        return None
    dim = placed(dim, len(x.shape))
    return Bound(partial(taken, mapping=kept(len(x.shape), (dim,)), at=dim), operands=(x, index), local=_selecting(dim))


def _selecting(dim: int) -> Any:
    return lambda decision: lambda parts, args, kwargs: torch.index_select(parts[0], dim, parts[1])


def _picking(run: Any, index_at: int, dim_at: int) -> Binding:
    """gather and take_along_dim have their arguments in another order."""

    def binding(call: Call) -> Bound | None:
        x, index = call.get(0, "input"), call.get(index_at, "index", "indices")
        dim = call.get(dim_at, "dim")
        if dim is None or not len(x.shape) or len(x.shape) != len(index.shape):
            return None
        dim = placed(dim, len(x.shape))
        rule = partial(along_dim, dim=dim)
        return Bound(rule, operands=(x, index), local=lambda decision: lambda parts, args, kwargs: run(*parts, dim))

    return binding


bind("gather", _picking(lambda x, index, dim: torch.gather(x, dim, index), 2, 1))
bind("take_along_dim", _picking(torch.take_along_dim, 1, 2))


@binds("scatter scatter_add scatter_ scatter_add_")
def _scatter(call: Call) -> Bound | None:
    """A number that is put, and what is put in place of sums, has no parts."""
    dim, source = call.get(1, "dim"), call.get(3, "src", "value")
    x, index = call.get(0, "input"), call.get(2, "index")
    if call.kwargs.get("reduce") is not None or len(call.args) > 4 or not isinstance(dim, int) or not len(x.shape):
        return None
    adds = "add" in call.func.__name__
    tensors = [v for v in (x, index, source) if isinstance(v, Tensor)]
    if any(len(one.shape) != len(x.shape) for one in tensors):
        return None
    return Bound(partial(scattered, dim=placed(dim, len(x.shape)), adds=adds))


@binds("scatter_reduce scatter_reduce_", (torch, Tensor))
def _scatter_reduce(call: Call) -> Bound | None:
    """A sum is one of parts, whatever of the first operand it replaces."""
    x, dim, how = call.get(0, "input"), call.get(1, "dim"), call.get(4, "reduce")
    index, source = call.get(2, "index"), call.get(3, "src")
    if not isinstance(dim, int) or not len(x.shape) or len({len(one.shape) for one in (x, index, source)}) > 1:
        return None
    keeps = bool(call.kwargs.get("include_self", True))
    rule = partial(scattered, dim=placed(dim, len(x.shape)), adds=how == "sum", keeps=keeps)
    return Bound(rule, operands=(x, index, source))


@binds("index_add index_copy index_add_ index_copy_")
def _index_add(call: Call) -> Bound | None:
    x, dim, source = call.get(0, "input"), call.get(1, "dim"), call.get(3, "source")
    index = call.get(2, "index")
    if not isinstance(dim, int) or not len(x.shape) or len(source.shape) != len(x.shape) or len(index.shape) != 1:
        return None
    return Bound(partial(indexed_add, dim=placed(dim, len(x.shape)), adds="add" in call.func.__name__))


@binds("index_fill index_fill_")
def _index_fill(call: Call) -> Bound | None:
    x, dim, value = call.get(0, "input"), call.get(1, "dim"), call.get(3, "value")
    if not isinstance(dim, int) or not len(x.shape) or isinstance(value, Tensor):
        return None
    rule = partial(_filled, dim=placed(dim, len(x.shape)))
    return Bound(rule)


def _filled(states: Any, shapes: Any, dim: int) -> Any:
    if isinstance(states[0], Cut) and states[0].dim != dim:
        yield Option((states[0], "R"), states[0])


@binds("one_hot", (F,))
def _one_hot(call: Call) -> Bound | None:
    """The number of classes is data where it is not given."""
    x, n = call.get(0, "tensor", "input"), call.get(1, "num_classes", default=-1)
    if not isinstance(n, int) or n < 0:
        return None
    return Bound(partial(mapped, mapping=kept(len(x.shape), ()), linear=False))


@binds("embedding", (F,))
def _embedding(call: Call) -> Bound | None:
    index, table, padding = call.get(0, "input"), call.get(1, "weight"), call.get(2, "padding_idx")
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq") or call.get(6, "sparse"):
        return None
    if padding is not None and padding < 0:
        padding += table.shape[0]
    places = call.space.places

    def local(decision: Decision) -> Local:
        rows = [
            (axis, state) for axis, state in enumerate(decision.wants[1]) if isinstance(state, Cut) and state.dim == 0
        ]
        if not rows:
            return lambda parts, args, kwargs: F.embedding(parts[0], parts[1], padding)
        axis, cut = rows[0]
        return partial(_own_rows, offset(cut, places[axis]), padding)

    return Bound(looked_up, operands=(index, table), local=local)


def _own_rows(start: int, padding: int | None, parts: list[Any], args: Any, kwargs: Any) -> Any:
    """The rows of a part of the table; zeros for those of others."""
    index, table = parts
    own = (index >= start) & (index < start + table.shape[0])
    if not table.shape[0]:
        zeros = table.new_zeros((*index.shape, table.shape[1]))
        return zeros + table.sum()  # stays in the graph
    if padding is not None:
        padding = padding - start if start <= padding < start + table.shape[0] else None
    found = F.embedding(torch.where(own, index - start, 0), table, padding)
    return found * own.unsqueeze(-1)
