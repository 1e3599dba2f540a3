"""Marks in a traced program what stacked kernels give, so that it can be computed of few rows.

A call of such a layer is traced as a program within the program, whose name says which it is. Proven from its programs
for other numbers of rows and of kernels is that it treats each row and each kernel alone (rowwise.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from unidist.keras.jax import layouts, rowwise
from unidist.keras.jax.experts.blocks import Plan, block_size
from unidist.keras.jax.regions import LayerCall
from unidist.keras.layer_facts import stack_of
from unidist.keras.patching.compat import get_stateless_scope
from unidist.keras.patching.layer_calls import Call, Stage, around
from unidist.keras.records.layer_report import in_words
from unidist.keras.strategies.distribution import adopt

# On a layer: what was found of it, in words.
TOLD = "_unidist_dispatch"


@dataclass(frozen=True, eq=False)
class Stack:
    """Describes one call of a layer with stacked kernels.

    Attributes:
        layer: is called.
        plan: says how few rows are computed.
        arguments: how many arrays the program takes: the values of the layer's variables, and rows.
    """

    layer: Any
    plan: Plan
    arguments: int


# By the names of their programs.
Marks = dict[str, Stack]


def tell(layer: Any, why: str = "") -> None:
    """Notes for `describe` what is done: why all is computed, or "" where few rows are."""
    few = "dispatch: each expert computes the rows that it has a weight for"
    object.__setattr__(layer, TOLD, f"all experts compute all rows: {why}" if why else few)


@contextlib.contextmanager
def marked(model: Any, distribution: Any) -> Iterator[Marks]:
    """Inside calls of a model's layers with stacked kernels are marked in what is traced."""
    marks: Marks = {}
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            if stack_of(layer):
                link = functools.partial(functools.partial, _call, marks, layer, distribution)
                stack.callback(around(layer, Stage.KERNELS, link))
        yield marks


def stack_of_equation(equation: Any, marks: Marks) -> Stack | None:
    """Returns the call that an equation of a program is."""
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    found = marks.get(equation.params["name"])
    return found if found is not None and len(equation.invars) == found.arguments else None


def _call(marks: Marks, layer: Any, distribution: Any, rest: Call, *args: Any, **kwargs: Any) -> Any:
    given = LayerCall.of(layer, rest, args, kwargs)
    if given is None or len(given.arrays) != 1:
        return rest(*args, **kwargs)
    rows = given.leaves[given.arrays[0]]
    values = [_value(variable) for variable in layer.variables]
    try:
        plan = _plan(given, distribution, rows, values)
    except Exception as error:  # whatever a layer may raise that counts its kernels
        plan = f"called with other numbers of kernels or rows it raises {type(error).__name__}: {in_words(error)}"
    if isinstance(plan, str):
        tell(layer, plan)
        return rest(*args, **kwargs)
    name = f"unidist_stack_{len(marks)}"
    marks[name] = Stack(layer, plan, len(values) + 1)

    def program(values: Sequence[Any], rows: Any) -> Any:
        return _outputs(given, values, rows)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program)(values, rows)


def _value(variable: Any) -> Any:
    scope = get_stateless_scope()
    found = None if scope is None else scope.get_current_value(variable)
    return variable._value if found is None else found


def _outputs(given: LayerCall, values: Sequence[Any], rows: Any) -> Any:
    """Returns what the layer gives: one array."""
    outputs, _, _ = given.run(values, [rows])
    (out,) = outputs
    return out


def _plan(given: LayerCall, distribution: Any, rows: Any, values: Sequence[Any]) -> Plan | str:
    """Returns how few rows are computed, or why all are."""
    layer = given.layer
    if any(getattr(one, "_seed_generators", None) for one in layer._flatten_layers()):
        return "it draws random numbers"
    stacked = tuple(any(v is own for own in stack_of(layer)) for v in layer.variables)
    count = stack_of(layer)[0].shape[0]

    def traced(kernels: int, size: int) -> Any:
        return jax.make_jaxpr(functools.partial(_outputs, given))(*_abstract(values, stacked, rows, kernels, size))

    more, fewer = rowwise.SIZES
    by_rows = traced(count, more), traced(count, fewer)
    by_kernels = traced(more, more), traced(fewer, more)
    if not rowwise.is_row_wise(*by_rows, 1) or not rowwise.is_row_wise(*by_kernels):
        return "its kernels do not compute one by one, or its rows do not"
    strategy = adopt(distribution).strategy
    mesh = distribution.device_mesh.backend_mesh
    axes = {layouts.of_native(layouts.placement(v, distribution).compute).dims for v in stack_of(layer)}
    dims = axes.pop() if len(axes) == 1 else ((), ())
    cut = dims[0] if dims else ()
    if len(dims) > 1 or count % layouts.places(mesh, cut):
        cut = ()
    over = tuple(a for a in mesh.axis_names if a in (*strategy.data_axes, *strategy.context_axes) and mesh.shape[a] > 1)
    plan = Plan(lambda values, rows: None, stacked, 1, mesh if mesh.size > 1 else None, cut, over)
    seen = -(-len(rows) // layouts.places(mesh, over)) * layouts.places(mesh, plan.both)
    size = block_size(seen, count)
    one = traced(1, size)
    if any(isinstance(constant, jax.core.Tracer) for constant in one.consts):
        return "it uses values that it was not given"

    def block(values: Sequence[Any], rows: Any) -> Any:
        return jaxpr_as_fun(one)(*values, rows)[0]

    return Plan(block, stacked, size, plan.mesh, cut, over)


def _abstract(
    values: Sequence[Any], stacked: Sequence[bool], rows: Any, kernels: int, size: int
) -> tuple[list[Any], Any]:
    def shaped(x: Any, first: int | None) -> Any:
        shape = tuple(x.shape) if first is None else (first, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)

    own = [shaped(x, kernels if is_own else None) for x, is_own in zip(values, stacked, strict=True)]
    return own, shaped(rows, size)
