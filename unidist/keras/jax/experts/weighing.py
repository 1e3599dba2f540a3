"""Finds where a program weighs and sums what stacked kernels give, and computes that of few rows.

The model's call is traced once more, and its program is run equation by equation. A product with weights of (kernels,
rows) whose sum over kernels follows, or a contraction of the two, becomes the sum of what each kernel makes of the rows
that it has a weight for (blocks.py), if weights that are zero have no gradient (zeros.py). All else runs as it is.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

from unidist.keras.jax.experts import blocks
from unidist.keras.jax.experts.stacks import Marks, marked, stack_of_equation, tell
from unidist.keras.jax.experts.zeros import Known, Zeros
from unidist.keras.patching.compat import get_keras_mask, set_keras_mask


def calling(model: Any, distribution: Any, call: Callable[..., Any], given: Any) -> Any:
    """A stateless call of a model, with `given` arguments: each kernel of a stack computes its own rows."""
    leaves, tree = jax.tree.flatten(given)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    seen: list[Any] = []

    def traced(arrays: Sequence[Any]) -> Any:
        own = list(leaves)
        for k, array in zip(places, arrays, strict=True):
            own[k] = array
            if (mask := get_keras_mask(leaves[k])) is not None:
                set_keras_mask(array, mask)
        args, kwargs = jax.tree.unflatten(tree, own)
        found, shape = jax.tree.flatten(call(*args, **kwargs))
        is_array = [isinstance(x, jax.Array) for x in found]
        arrays = [x for x, own in zip(found, is_array, strict=True) if own]
        seen[:] = [shape, is_array, [x for x, own in zip(found, is_array, strict=True) if not own]]
        return arrays, [get_keras_mask(x) for x in arrays]

    with marked(model, distribution) as marks:
        program, structure = jax.make_jaxpr(traced, return_shape=True)([leaves[k] for k in places])
    run = _Run(marks).closed(program, [leaves[k] for k in places])
    arrays, masks = jax.tree.unflatten(jax.tree.structure(structure), run)
    for x, mask in zip(arrays, masks, strict=True):
        if mask is not None:
            set_keras_mask(x, mask)
    shape, is_array, others = seen
    mixed, rest = iter(arrays), iter(others)
    return jax.tree.unflatten(shape, [next(mixed) if own else next(rest) for own in is_array])


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum of what kernels give, in a program.

    Attributes:
        stack: the equation of the call. weights: variable of what they are multiplied by.
        by_rows: weights are of (rows, kernels), and not of (kernels, rows).
    """

    stack: Any
    weights: Any
    by_rows: bool = False


class _Run:
    """Runs a program with marks."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def closed(self, program: ClosedJaxpr, given: Sequence[Any], zeros: Sequence[Known] = ()) -> list[Any]:
        """Returns what a program gives; `zeros`: what is known of what it is given."""
        jaxpr = program.jaxpr
        held: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        held.update(zip(jaxpr.invars, given, strict=True))
        known = Zeros()
        for variable, one in zip(jaxpr.invars, zeros, strict=False):
            known.note(variable, one)
        sums, left_out = self._sums(jaxpr)

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else held[variable]

        for equation in jaxpr.eqns:
            if id(equation) in left_out:
                known.follow(equation)
                continue
            found = sums.get(id(equation))
            if found is not None:
                out = [self._sum(found, known, equation, read)]
            else:
                out = self._equation(equation, list(map(read, equation.invars)), known)
            known.follow(equation)
            held.update(zip(equation.outvars, out, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, equation: Any, given: list[Any], known: Zeros) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if self._has_marks(equation) and stack_of_equation(equation, self._marks) is None:
            zeros = [known.of(variable) for variable in equation.invars]
            if name in ("jit", "pjit"):
                return self.closed(params["jaxpr"], given, zeros)
            if name in ("checkpoint", "remat", "remat2"):
                inner = ClosedJaxpr(params["jaxpr"], ())
                again = functools.partial(self.closed, inner, zeros=zeros)
                more = {key: params[key] for key in ("policy", "prevent_cse") if key in params}
                return jax.checkpoint(lambda *args: again(args), **more)(*given)  # type: ignore[no-any-return]
        if (stack := stack_of_equation(equation, self._marks)) is not None:
            tell(stack.layer, "what it gives is not multiplied by weights and summed")
        bound = equation.primitive.get_bind_params(params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair in older versions
        with equation.ctx.manager:
            out = equation.primitive.bind(*functions, *given, **params)
        return list(out) if equation.primitive.multiple_results else [out]

    def _has_marks(self, equation: Any) -> bool:
        return any(
            stack_of_equation(inner, self._marks) is not None or self._has_marks(inner)
            for program in jaxprs_in_params(equation.params)
            for inner in program.eqns
        )

    # finding sums -------------------------------------------------------------------------------------------------

    def _sums(self, jaxpr: Any) -> tuple[dict[int, _Sum], set[int]]:
        """(sums by the equation that they are the result of, the equations that are not run then)."""
        uses: Counter[Any] = Counter(v for e in jaxpr.eqns for v in e.invars if not isinstance(v, Literal))
        uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
        reader = {v: e for e in jaxpr.eqns for v in e.invars if not isinstance(v, Literal) and uses[v] == 1}
        maker = {v: e for e in jaxpr.eqns for v in e.outvars}
        sums: dict[int, _Sum] = {}
        left_out: set[int] = set()
        for equation in jaxpr.eqns:
            if stack_of_equation(equation, self._marks) is None:
                continue
            out = equation.outvars[0]
            user = reader.get(out)
            if user is not None and (weights := _contracted(user, out)) is not None:
                sums[id(user)] = _Sum(equation, *weights)
                left_out.add(id(equation))
            elif user is not None and (weight := _factor(user, out, maker)) is not None:
                behind = reader.get(user.outvars[0])
                if behind is not None and _is_sum(behind):
                    sums[id(behind)] = _Sum(equation, weight)
                    left_out |= {id(equation), id(user)}
        return sums, left_out

    def _sum(self, found: _Sum, known: Zeros, equation: Any, read: Callable[[Any], Any]) -> Any:
        stack = stack_of_equation(found.stack, self._marks)
        assert stack is not None
        *values, rows = map(read, found.stack.invars)
        weights = read(found.weights)
        weights = weights.T if found.by_rows else weights.reshape(weights.shape[0], weights.shape[1], -1)[:, :, 0]
        if known.of(found.weights).still:
            tell(stack.layer)
            return blocks.summed(stack.plan, values, rows, weights)
        tell(stack.layer, "weights that are zero may have a gradient")
        return _of_all(found.stack, values, rows, weights)


def _of_all(equation: Any, values: list[Any], rows: Any, weights: Any) -> Any:
    out = jaxpr_as_fun(equation.params["jaxpr"])(*values, rows)[0]
    return (out * weights.reshape(*weights.shape, *[1] * (out.ndim - 2))).sum(0)


def _factor(equation: Any, out: Any, maker: dict[Any, Any]) -> Any:
    """The variable of weights of (kernels, rows) that an output is multiplied by; None: there is none."""
    if equation.primitive.name != "mul":
        return None
    (other,) = [v for v in equation.invars if v is not out] or [None]
    if other is None or isinstance(other, Literal) or other.aval.dtype != out.aval.dtype:
        return None
    made = maker.get(other)
    if made is not None and made.primitive.name == "broadcast_in_dim" and made.invars[0].aval.ndim >= 2:
        given, dims = made.invars[0], made.params["broadcast_dimensions"]
        if dims[:2] == (0, 1) and given.aval.shape[:2] == out.aval.shape[:2] and _is_thin(given):
            return given
    return other if other.aval.shape[:2] == out.aval.shape[:2] and _is_thin(other) else None


def _is_thin(variable: Any) -> bool:
    return all(n == 1 for n in variable.aval.shape[2:])


def _is_sum(equation: Any) -> bool:
    return bool(equation.primitive.name == "reduce_sum" and tuple(equation.params["axes"]) == (0,))


def _contracted(equation: Any, out: Any) -> tuple[Any, bool] | None:
    """(weights, whether these are of (rows, kernels)) of a contraction over kernels, row by row."""
    if equation.primitive.name != "dot_general" or equation.outvars[0].aval.dtype != out.aval.dtype:
        return None
    sums, batch = equation.params["dimension_numbers"]
    own = next(k for k, v in enumerate(equation.invars) if v is out)
    other = equation.invars[1 - own]
    if isinstance(other, Literal) or other is out or other.aval.ndim != 2 or other.aval.dtype != out.aval.dtype:
        return None
    if tuple(sums[own]) != (0,) or tuple(batch[own]) != (1,):
        return None
    return other, tuple(sums[1 - own]) == (1,)
