"""Proves from a program that its zeros have no gradient, so that they may be left out of a sum.

Of each value it is known whether nothing that learns has part in it, whether none of it is below zero, and whether
those of it that are zero have a derivative of zero: a softmax and what is chosen of it, a relu, their products with
numbers that do not learn, their sums. What is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal


@dataclass(frozen=True, slots=True)
class Known:
    """Says what is known of a value.

    Attributes:
        still: its zeros have no gradient.
        positive: it is nowhere below zero.
    """

    still: bool = False
    positive: bool = False


_NOTHING, _BOTH = Known(), Known(still=True, positive=True)


def of_constant(value: Any) -> Known:
    """Returns what is known of an array that does not learn."""
    small = np.ndim(value) == 0
    return Known(still=True, positive=small and bool(np.all(np.asarray(value) >= 0)))


class Zeros:
    """Knows of the values of one program, whose equations are followed in order."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def of(self, variable: Any) -> Known:
        if isinstance(variable, Literal):
            return of_constant(variable.val)
        return self._known.get(variable) or _by_dtype(variable)

    def note(self, variable: Any, known: Known) -> None:
        self._known[variable] = known

    def follow(self, equation: Any) -> None:
        """Notes what is known of what an equation gives."""
        given = [self.of(variable) for variable in equation.invars]
        for variable, known in zip(equation.outvars, _behind(equation, given), strict=True):
            self._known[variable] = Known(
                still=known.still or _by_dtype(variable).still, positive=known.positive or _by_dtype(variable).positive
            )


def _by_dtype(variable: Any) -> Known:
    """Returns what a dtype says: what is no real number does not learn."""
    dtype = variable.aval.dtype
    return Known(still=not jnp.issubdtype(dtype, jnp.inexact), positive=dtype == jnp.bool_)


def _behind(equation: Any, given: Sequence[Known]) -> Sequence[Known]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name in _PROGRAMS:
        return _inside(equation.params[_PROGRAMS[name]], given)
    if name == "custom_jvp_call":
        return [_BOTH if _is_relu(equation) else _NOTHING] * count
    rule = _RULES.get(name)
    return [_NOTHING] * count if rule is None else [rule(equation, given)] * count


def _is_relu(equation: Any) -> bool:
    """Returns whether a program with a derivative of its own is jax.nn.relu, whose is zero at zero."""
    outer = equation.params["call_jaxpr"].jaxpr.eqns
    if len(outer) != 1 or outer[0].params.get("name") != "relu" or len(outer[0].params["jaxpr"].jaxpr.eqns) != 1:
        return False
    (inner,) = outer[0].params["jaxpr"].jaxpr.eqns
    return inner.primitive.name == "max" and any(isinstance(x, Literal) and x.val == 0 for x in inner.invars)


def _inside(program: Any, given: Sequence[Known]) -> Sequence[Known]:
    jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    zeros = Zeros()
    for variable, known in zip(jaxpr.invars, given, strict=True):
        zeros.note(variable, known)
    for variable, value in zip(jaxpr.constvars, constants, strict=False):
        zeros.note(variable, of_constant(value) if isinstance(value, np.ndarray) else _NOTHING)
    for equation in jaxpr.eqns:
        zeros.follow(equation)
    return [zeros.of(variable) for variable in jaxpr.outvars]


def _chosen(equation: Any, given: Sequence[Known]) -> Known:
    """Gives some of its first operand's numbers as they are."""
    return given[0]


def _product(equation: Any, given: Sequence[Known]) -> Known:
    return _all(given)


def _all(given: Sequence[Known]) -> Known:
    return Known(still=all(x.still for x in given), positive=all(x.positive for x in given))


def _sum(equation: Any, given: Sequence[Known]) -> Known:
    """A sum is zero where its terms are, if none is below zero."""
    return _BOTH if _all(given) == _BOTH else _NOTHING


def _largest(equation: Any, given: Sequence[Known]) -> Known:
    return Known(still=all(x.still for x in given), positive=any(x.positive for x in given))


def _quotient(equation: Any, given: Sequence[Known]) -> Known:
    return Known(still=given[0].still, positive=_all(given).positive)


def _selected(equation: Any, given: Sequence[Known]) -> Known:
    return _all(given[1:])


def _cast(equation: Any, given: Sequence[Known]) -> Known:
    """To fewer exponents small numbers become zeros that learn."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if given[0].still and jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact):
        return given[0] if _least(after) <= _least(before) else Known(positive=given[0].positive)
    return given[0]


def _least(dtype: Any) -> int:
    return int(jnp.finfo(dtype).minexp)  # type: ignore[no-untyped-call]


def _written(equation: Any, given: Sequence[Known]) -> Known:
    """A scatter's operand and updates; its indices are between them."""
    return _all([given[0], *given[2:]])


def _added(equation: Any, given: Sequence[Known]) -> Known:
    return _BOTH if _written(equation, given) == _BOTH else _NOTHING


_PROGRAMS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat": "jaxpr"}
_RULES: dict[str, Callable[[Any, Sequence[Known]], Known]] = {
    **dict.fromkeys(("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "rev"), _chosen),
    **dict.fromkeys(("copy", "copy_p", "gather", "dynamic_slice", "top_k", "sharding_constraint", "split"), _chosen),
    **dict.fromkeys(("reduce_max", "reduce_min"), _chosen),
    **dict.fromkeys(("exp", "exp2", "logistic", "square"), lambda equation, given: _BOTH),
    **dict.fromkeys(("mul", "concatenate", "sort"), _product),
    **dict.fromkeys(("add", "add_any", "reduce_sum", "cumsum", "dot_general"), _sum),
    "scatter": _written,
    "scatter-add": _added,
    "max": _largest,
    "div": _quotient,
    "select_n": _selected,
    "convert_element_type": _cast,
    "stop_gradient": lambda equation, given: Known(still=True, positive=given[0].positive),
}
