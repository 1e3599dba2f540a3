"""Functions of torch on RowParts whose arguments name the whole shape, or that have no row in what they give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.algebra import Layout
from unidist.keras.torch.moving import move
from unidist.keras.torch.rows import rowwise
from unidist.keras.torch.rows.parts import Part, as_parts, on_parts, whole
from unidist.keras.torch.rows.rowparts import RowPart, anchored, looking, own_rows


def _dims(x: Any) -> list[int]:
    return [int(n) for n in (x[0] if len(x) == 1 and isinstance(x[0], (tuple, list)) else x)]


def _reshaped(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The first dim stays, whatever becomes of the others."""
    x = args[0]
    shape = _dims(args[1:] or (kwargs.get("shape") or kwargs.get("size"),))
    if not isinstance(x, RowPart) or x.part is None or not shape or not x.shape[0]:
        return None
    rest, each = shape[1:], x.numel() // x.shape[0]
    if shape[0] not in (-1, x.shape[0]) or (shape[0] == -1 and (-1 in rest or math.prod(rest) != each)):
        return None
    if -1 in rest:
        known = math.prod(n for n in rest if n != -1)
        rest = [each // known if n == -1 and known else n for n in rest]
    if math.prod(rest) != each:
        return None
    return as_parts(x, x.part.reshape(x.part.shape[0], *rest))


def _expanded(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, sizes = args[0], _dims(args[1:] or (kwargs.get("size"),))
    if not isinstance(x, RowPart) or x.part is None or len(sizes) != x.ndim or sizes[0] not in (-1, x.shape[0]):
        return None
    return as_parts(x, x.part.expand(-1, *sizes[1:]))


def _indexed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """All rows, and something of each."""
    x, index = args[0], args[1]
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, RowPart) or x.part is None or not entries:
        return None
    taken = sum(entry is not None for entry in entries[1:])
    if isinstance(entries[0], slice):
        if entries[0] != slice(None):
            return _batch_of(x, index)
    elif entries[0] is not Ellipsis or taken >= x.ndim:
        return None
    tensors = [entry for entry in entries[1:] if isinstance(entry, torch.Tensor)]
    plain = all(entry is None or entry is Ellipsis or isinstance(entry, (int, slice)) for entry in entries[1:])
    if not plain and (
        len(tensors) != 1
        or isinstance(tensors[0], Part)
        or not all(isinstance(entry, (slice, torch.Tensor)) for entry in entries[1:])
    ):
        return None
    return as_parts(x, x.part[index])


def _batch_of(x: RowPart, index: Any) -> RowPart | None:
    """The rows of one of the batches that stand behind each other, as a slice."""
    if x.part is None or not isinstance(index, slice) or len(x.batches) == 1:
        return None
    start, stop, step = index.indices(x.shape[0])
    ends = list(itertools.accumulate(x.batches, initial=0))
    if step != 1 or (start, stop) not in itertools.pairwise(ends):
        return None
    k = ends.index(start)
    return RowPart.of(x.frame, x.part.split(x.counts)[k], x.batches[k])


def _joined(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tensors with the same rows, side by side or along a new dim behind the rows; or batches behind each other."""
    members = args[0]
    given = [x for x in members if isinstance(x, RowPart)]
    if not given or any(x.part is None for x in given):
        return None
    first = given[0]
    ndim = first.ndim + (func in _STACKING)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if not isinstance(dim, int) or any(x.ndim != first.ndim for x in members):
        return None
    if dim % ndim == 0:
        return None if func in _STACKING else _behind_each_other(members)
    if any(x.shape[0] != first.shape[0] for x in members) or any(not x.goes_with(first) for x in given):
        return None
    return as_parts(first, func([x.part if isinstance(x, RowPart) else first.own(x) for x in members], dim))


def _behind_each_other(members: Sequence[Any]) -> RowPart | None:
    """One tensor of batches behind each other, of which whole ones have as many rows as another."""
    first = next(x for x in members if isinstance(x, RowPart))
    totals = {n for x in members if isinstance(x, RowPart) for n in x.batches}
    if any(not isinstance(x, RowPart) and x.shape[0] not in totals for x in members):
        return None
    if any(isinstance(x, RowPart) and x.frame is not first.frame for x in members):
        return None
    parts = [whole(x.part) if isinstance(x, RowPart) else own_rows(first.frame, x) for x in members]
    batches = [x.batches if isinstance(x, RowPart) else (x.shape[0],) for x in members]
    return RowPart.behind_each_other(first.frame, torch.cat(parts), tuple(n for one in batches for n in one))


def _parted(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Along dims behind the rows; along the rows the batches that stand behind each other."""
    x: Any = args[0]
    sizes: Any = args[1] if len(args) > 1 else kwargs.get("split_size", kwargs.get("chunks"))
    dim = args[2] if len(args) > 2 else kwargs.get("dim", kwargs.get("axis", 0))
    if not isinstance(x, RowPart) or x.part is None or dim % x.ndim:
        return _behind(2)(func, args, kwargs)
    batches = x.batches
    if isinstance(sizes, (list, tuple)):
        fits = tuple(sizes) == batches
    else:
        each = sizes if func in _SPLITTING else -(-x.shape[0] // sizes)
        fits = all(n == each for n in batches)
    if not fits:
        return None
    return tuple(RowPart.of(x.frame, part, n) for part, n in zip(x.part.split(x.counts), batches, strict=True))


def _product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Rows times a matrix that is the same for all, or the matrices of the rows each with its own."""
    if len(args) != 2 or kwargs:
        return None
    a, b = args
    if isinstance(a, RowPart) and isinstance(b, RowPart):
        fits = a.ndim == b.ndim > 2 and a.goes_with(b) and a.shape[0] == b.shape[0]
        first: Any = a
    elif isinstance(a, RowPart):
        fits, first = a.ndim > 1 and b.ndim <= 2, a
    else:
        fits, first = isinstance(b, RowPart) and b.ndim > 2 and a.ndim <= 2, b
    if not fits or any(isinstance(x, RowPart) and x.part is None for x in (a, b)):
        return None
    return as_parts(first, func(*(x.part if isinstance(x, RowPart) else x for x in (a, b))))


def _of_the_first(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Functions of rows with weights that are the same for all: linear, embedding, convolutions, pooling."""
    x, others = args[0], (*args[1:], *kwargs.values())
    if not isinstance(x, RowPart) or x.part is None or any(isinstance(other, Part) for other in others):
        return None
    return as_parts(x, func(x.part, *args[1:], **kwargs)) if x.ndim >= _LEAST_DIMS.get(func, 1) else None


def _summed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A sum or a mean over the rows: this shard's sum, then an all_reduce (P -> F)."""
    x = args[0]
    if not isinstance(x, RowPart) or x.part is None or set(kwargs) - {"dim", "axis", "keepdim", "dtype"}:
        return None
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    named = range(x.ndim) if dims is None else dims if isinstance(dims, (tuple, list)) else [dims]
    given = [d % x.ndim for d in named]
    if 0 not in given or len(args) > 3:
        return None
    keepdim = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    dtype = kwargs.get("dtype") or (x.dtype if x.is_floating_point() else None)
    # As torch does inside a sum of low precision.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    own = torch.sum(whole(x.part), given, keepdim, dtype=wide)
    axes = x.frame.world.data_axes
    with looking(x.frame):
        total = move(x.frame, anchored(own), tuple(own.shape), Layout(partial=axes), Layout(fanout=axes))
    found = total / math.prod(x.shape[d] for d in given) if func in _MEANS else total
    return found if dtype is None else found.to(dtype)


def _with_gradient(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A gradient of the rows is wanted."""
    x = args[0]
    if not isinstance(x, RowPart) or x.part is None:
        return None
    func(x.part, *args[1:], **kwargs)
    return x


def _gradient(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, RowPart) or x.part is None or x.part.grad is None:
        return None
    return as_parts(x, x.part.grad)


def _einsum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A letter for the rows that is the first of every tensor that has them, of the result, and of nothing else."""
    equation, *tensors = args
    tensors = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    given = [x for x in tensors if isinstance(x, RowPart)]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or not given:
        return None
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    letters = {term[:1] for term, x in zip(terms, tensors, strict=True) if isinstance(x, RowPart)}
    if len(letters) != 1 or any(x.part is None or not x.goes_with(given[0]) for x in given):
        return None
    (letter,) = letters
    with_rows = [term for term, x in zip(terms, tensors, strict=True) if isinstance(x, RowPart)]
    without = [term for term, x in zip(terms, tensors, strict=True) if not isinstance(x, RowPart)]
    if right[:1] != letter or any(term.count(letter) != 1 for term in (*with_rows, right)):
        return None
    if any(letter in term for term in without):
        return None
    return as_parts(given[0], func(equation, *(x.part if isinstance(x, RowPart) else x for x in tensors)))


def _kept(condition: Callable[[int, Sequence[Any], dict[str, Any]], bool]) -> Any:
    """A handler of functions that leave the rows where they are under a condition."""

    def handler(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return on_parts(func, condition, args, kwargs)

    return handler


def _last_unless_given(place: int) -> Any:
    """Along the last dim, or the one that the argument at `place` names; never along the rows."""

    def condition(ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        return isinstance(dim, int) and dim % ndim > 0

    return _kept(condition)


def _behind(*storages: int, new: int = 0) -> Any:
    """The dims that the arguments at these places name stand behind the rows; `new`: dims that the result has more."""

    def condition(ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        names = ("dim", "dim0", "dim1", "axis", "start_dim")
        dims = [args[p] for p in storages if p < len(args)] + [kwargs[n] for n in names if n in kwargs]
        return bool(dims) and all(isinstance(d, int) and d % (ndim + new) > 0 for d in dims)

    return _kept(condition)


_SPLITTING = frozenset(rowwise.named(["split"]))
_STACKING = frozenset(rowwise.named(["stack"]))
_MEANS = frozenset(rowwise.named(["mean"]))
_LEAST_DIMS = {
    **dict.fromkeys(rowwise.named(["linear"]), 2),
    **dict.fromkeys(rowwise.named(["conv1d", "max_pool1d", "avg_pool1d"]), 3),
    **dict.fromkeys(rowwise.named(["conv2d", "max_pool2d", "avg_pool2d"]), 4),
    **dict.fromkeys(rowwise.named(["conv3d", "max_pool3d", "avg_pool3d"]), 5),
}
_WINDOWS = tuple(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("conv", "max_pool", "avg_pool"))
_ROWS_FIRST = ("linear", "embedding", "one_hot", *_WINDOWS)
HANDLERS = {
    **dict.fromkeys(rowwise.named(["reshape", "view"]), _reshaped),
    **dict.fromkeys(rowwise.named(["expand", "broadcast_to"]), _expanded),
    **dict.fromkeys(rowwise.named(["__getitem__"]), _indexed),
    **dict.fromkeys(rowwise.named(["cat", "concat", "concatenate", "stack"]), _joined),
    **dict.fromkeys(rowwise.named(["matmul", "mm", "bmm", "__matmul__"]), _product),
    **dict.fromkeys(rowwise.named(_ROWS_FIRST), _of_the_first),
    **dict.fromkeys(rowwise.named(["sum", "mean"]), _summed),
    **dict.fromkeys(rowwise.named(["einsum"]), _einsum),
    **dict.fromkeys(rowwise.named(["topk"]), _last_unless_given(2)),
    **dict.fromkeys(rowwise.named(["sort", "argsort", "normalize"]), _last_unless_given(1)),
    **dict.fromkeys(rowwise.named(["transpose", "swapaxes"]), _behind(1, 2)),
    **dict.fromkeys(rowwise.named(["unsqueeze"]), _behind(1, new=1)),
    **dict.fromkeys(
        rowwise.named(["squeeze", "flatten", "argmax", "argmin", "max", "min", "gather", "unbind"]), _behind(1)
    ),
    **dict.fromkeys(rowwise.named(["split", "chunk"]), _parted),
    torch.Tensor.requires_grad_: _with_gradient,
    torch.Tensor.requires_grad.__set__: _with_gradient,  # type: ignore[attr-defined]
    vars(torch._C.TensorBase)["grad"].__get__: _gradient,
}
