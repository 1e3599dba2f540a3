"""Proves from a traced function's program that it treats each row alone: of all it takes and gives.

Rows are those of dim 0.

The function is traced with two numbers of rows. A dim whose size differs between the two programs is a dim of rows.
Every operation on such a dim must be one that is known to treat its places one by one; everything else of the programs
must be equal, so no number of the first can have come from the number of rows. What is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# The numbers of rows to trace with.
SIZES = (6, 4)

Dims = list[int | None]


@dataclass(frozen=True)
class Equation:
    """One operation of both programs.

    Attributes:
        params: its parameters in the program with more rows.
        shapes, out_shapes: of what it takes and gives there.
        rows, out_rows: the dims of rows of these, None where there is none.
        fewer: its parameters in the program with fewer rows.
    """

    params: dict[str, Any]
    shapes: list[tuple[int, ...]]
    out_shapes: list[tuple[int, ...]]
    rows: Dims
    out_rows: Dims
    fewer: dict[str, Any]


def is_row_wise(more: ClosedJaxpr, fewer: ClosedJaxpr, dim: int = 0) -> bool:
    """Returns whether the programs of one function, traced with SIZES rows, treat each row alone.

    They must give rows only, along this dim.
    """
    outputs = zip(more.jaxpr.outvars, fewer.jaxpr.outvars, strict=False)
    return _same_programs(more, fewer) and all(_row_dim(a, b) == dim for a, b in outputs)


def _same_programs(more: Any, fewer: Any) -> bool:
    (a, constants), (b, others) = _opened(more), _opened(fewer)
    if any(isinstance(constant, jax.core.Tracer) for constant in constants) or not _equal(constants, others):
        return False
    if a.effects or b.effects or len(a.eqns) != len(b.eqns) or len(a.outvars) != len(b.outvars):
        return False
    return all(_is_allowed(x, y) for x, y in zip(a.eqns, b.eqns, strict=True)) and _same_literals(a.outvars, b.outvars)


def _opened(program: Any) -> tuple[Any, list[Any]]:
    return (program.jaxpr, list(program.consts)) if isinstance(program, ClosedJaxpr) else (program, [])


def _is_allowed(more: Any, fewer: Any) -> bool:
    if more.primitive is not fewer.primitive:
        return False
    if len(more.invars) != len(fewer.invars) or len(more.outvars) != len(fewer.outvars):
        return False
    if not _same_literals(more.invars, fewer.invars):
        return False
    try:
        rows = [_row_dim(a, b) for a, b in zip(more.invars, fewer.invars, strict=True)]
        out_rows = [_row_dim(a, b) for a, b in zip(more.outvars, fewer.outvars, strict=True)]
    except _SeveralDimsError:
        return False
    step = Equation(more.params, _shapes(more.invars), _shapes(more.outvars), rows, out_rows, fewer.params)
    if all(dim is None for dim in (*rows, *out_rows)):
        return _unchanged(step)
    rule = RULES.get(more.primitive.name)
    return rule is not None and rule(step)


class _SeveralDimsError(Exception):
    """Two dims of one array depend on the number of rows."""


def _row_dim(more: Any, fewer: Any) -> int | None:
    a, b = more.aval.shape, fewer.aval.shape
    found = [dim for dim in range(len(a)) if len(a) != len(b) or a[dim] != b[dim]]
    if len(found) > 1:
        raise _SeveralDimsError
    return found[0] if found else None


def _shapes(variables: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(variable.aval.shape) for variable in variables]


def _same_literals(more: Sequence[Any], fewer: Sequence[Any]) -> bool:
    for a, b in zip(more, fewer, strict=True):
        if isinstance(a, Literal) != isinstance(b, Literal):
            return False
        if isinstance(a, Literal) and not _equal(a.val, b.val):
            return False
    return True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (np.ndarray, jax.Array)) or isinstance(b, (np.ndarray, jax.Array)):
        return np.shape(a) == np.shape(b) and bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"))
    if isinstance(a, (Jaxpr, ClosedJaxpr)):
        return isinstance(b, type(a)) and _same_programs(a, b)
    # NaN is what a gather fills with.
    return bool(a == b) or bool(a != a and b != b)


# rules: whether a step treats the places of the dim of rows one by one ----------------------------------------------


def _elementwise(step: Equation) -> bool:
    """Returns whether what it takes has the shape of what it gives, or one that is repeated to it."""
    (out,) = step.out_rows
    if out is None:
        return False
    given = [(dim, shape) for dim, shape in zip(step.rows, step.shapes, strict=True) if shape]
    return all(dim == out or (dim is None and shape[out] == 1) for dim, shape in given) and _unchanged(step)


def _unchanged(step: Equation, *but: str) -> bool:
    """Returns whether the parameters are equal.

    Functions are left out, which differ between two traces of one program, and shardings, which change no number.
    """
    left_out = (*but, "sharding", "out_sharding")
    ours, others = (
        {key: value for key, value in params.items() if key not in left_out and not callable(value)}
        for params in (step.params, step.fewer)
    )
    return _equal(ours, others)


def _broadcast(step: Equation) -> bool:
    dim, out = step.rows[0], step.out_rows[0]
    return dim is None or step.params["broadcast_dimensions"][dim] == out


def _reshape(step: Equation) -> bool:
    dim, out = step.rows[0], step.out_rows[0]
    if dim is None or out is None or step.params.get("dimensions") is not None:
        return False
    before, after = step.shapes[0], step.out_shapes[0]
    return before[dim] == after[out] and prod(before[:dim]) == prod(after[:out])


def _transpose(step: Equation) -> bool:
    out = step.out_rows[0]
    return out is not None and step.params["permutation"][out] == step.rows[0] and _unchanged(step)


def _dropping(name: str) -> Callable[[Equation], bool]:
    """Takes the dims of a parameter away: they are no rows, and the rows are where they are without them."""

    def rule(step: Equation) -> bool:
        dim, named = step.rows[0], step.params[name]
        gone = (named,) if isinstance(named, int) else named
        if dim is None or dim in gone:
            return False
        return all(out == dim - sum(other < dim for other in gone) for out in step.out_rows) and _unchanged(step)

    return rule


def _along(name: str) -> Callable[[Equation], bool]:
    """Works along the dim of a parameter."""

    def rule(step: Equation) -> bool:
        return step.rows[0] is not None and step.params[name] != step.rows[0] and _stays(step) and _unchanged(step)

    return rule


def _stays(step: Equation) -> bool:
    """Every operand but scalars, and every result, has its rows in one place."""
    given = {dim for dim, shape in zip(step.rows, step.shapes, strict=True) if shape}
    return len(given | set(step.out_rows)) == 1


def _stack(step: Equation) -> bool:
    dim, axis = step.rows[0], step.params["axis"]
    return dim is not None and set(step.rows) == {dim} and step.out_rows[0] == dim + (axis <= dim)


def _reverse(step: Equation) -> bool:
    return step.rows[0] not in step.params["dimensions"] and _stays(step) and _unchanged(step)


def _slice(step: Equation) -> bool:
    dim = step.rows[0]
    if dim is None or step.out_rows[0] != dim:
        return False
    strides = step.params["strides"]
    whole = step.params["start_indices"][dim] == 0 and step.params["limit_indices"][dim] == step.shapes[0][dim]
    return whole and (strides is None or strides[dim] == 1) and _unchanged(step, "limit_indices")


def _dynamic_slice(step: Equation) -> bool:
    dim = step.rows[0]
    if dim is None or step.out_rows[0] != dim or any(other is not None for other in step.rows[1:]):
        return False
    return bool(step.params["slice_sizes"][dim] == step.shapes[0][dim])


def _pad(step: Equation) -> bool:
    dim = step.rows[0]
    if dim is None or step.rows[1] is not None or step.out_rows[0] != dim:
        return False
    return tuple(step.params["padding_config"][dim]) == (0, 0, 0) and _unchanged(step)


def _dot(step: Equation) -> bool:
    (left_sums, right_sums), (left_batch, right_batch) = step.params["dimension_numbers"]
    left, right = step.rows
    if left in left_sums or right in right_sums or not _unchanged(step):
        return False
    if left is not None and right is not None:
        place = next(
            (i for i, dims in enumerate(zip(left_batch, right_batch, strict=True)) if dims == (left, right)), None
        )
        return place is not None and step.out_rows[0] == place
    kept = [d for d in range(len(step.shapes[0])) if d not in (*left_sums, *left_batch)]
    if left is not None:
        return left in kept and step.out_rows[0] == len(left_batch) + kept.index(left)
    kept_right = [d for d in range(len(step.shapes[1])) if d not in (*right_sums, *right_batch)]
    return right in kept_right and step.out_rows[0] == len(left_batch) + len(kept) + kept_right.index(right)


def _convolution(step: Equation) -> bool:
    numbers = step.params["dimension_numbers"]
    left, right = step.rows
    places = left == numbers.lhs_spec[0] and right is None and step.out_rows[0] == numbers.out_spec[0]
    return places and step.params["batch_group_count"] == 1 and _unchanged(step, "lhs_shape")


def _gather(step: Equation) -> bool:
    numbers, out = step.params["dimension_numbers"], step.out_rows[0]
    (dim, index), ndim = step.rows, len(step.out_shapes[0])
    batch = [d for d in range(ndim) if d not in numbers.offset_dims]
    if not _unchanged(step, "slice_sizes"):
        return False
    if dim is None:
        same = _equal(step.params["slice_sizes"], step.fewer["slice_sizes"])
        return same and index is not None and index < len(batch) and out == batch[index]
    if index is None:
        taken = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        if dim in (*taken, *numbers.start_index_map) or step.params["slice_sizes"][dim] != step.shapes[0][dim]:
            return False
        kept = [d for d in range(len(step.shapes[0])) if d not in taken]
        return bool(out == numbers.offset_dims[kept.index(dim)])
    pairs = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    return (dim, index) in pairs and out == batch[index]


def _iota(step: Equation) -> bool:
    return bool(step.params["dimension"] != step.out_rows[0])


def _scan(step: Equation) -> bool:
    constants, carried = step.params["num_consts"], step.params["num_carry"]
    scanned = [*step.rows[constants + carried :], *step.out_rows[carried:]]
    # Their dim 0 is the one that is gone through.
    return 0 not in scanned and _inside(step)


def _cond(step: Equation) -> bool:
    return step.rows[0] is None and _inside(step)


def _inside(step: Equation) -> bool:
    """Returns whether a program within the program is allowed: it must be unchanged.

    (The derivative of a custom_jvp_call is that of a program that was read.)
    """
    return _unchanged(step, "jvp", "jvp_jaxpr_fun")


_EACH = (
    *("add", "sub", "mul", "div", "rem", "pow", "integer_pow", "max", "min", "neg", "sign", "abs", "floor", "ceil"),
    *("round", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma", "rsqrt"),
    *("sqrt", "cbrt", "square", "is_finite", "nextafter", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"),
    *("xor", "shift_left", "shift_right_logical", "shift_right_arithmetic", "select_n", "clamp", "add_any"),
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient", "population_count", "clz"),
)
_REDUCING = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"),
    *("argmax", "argmin"),
)
# Not custom_vjp_call: its gradient is a program that is not here to be read.
_PROGRAMS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "while")
RULES: dict[str, Callable[[Equation], bool]] = {
    **dict.fromkeys(_EACH, _elementwise),
    **dict.fromkeys(_REDUCING, _dropping("axes")),
    **dict.fromkeys(_PROGRAMS, _inside),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("sort", "concatenate"), _along("dimension")),
    "split": _along("axis"),
    "stack": _stack,
    "unstack": _dropping("axis"),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _dropping("dimensions"),
    "transpose": _transpose,
    "rev": _reverse,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "iota": _iota,
    "scan": _scan,
    "cond": _cond,
}
