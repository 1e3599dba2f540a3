"""Operations that XLA's partitioner gets wrong along some dims, which are whole on every device there.

It ends the process, gives other numbers or programs that XLA refuses to run, with JAX 0.10 on CPUs. All that is global
passes here as a primitive of JAX, whoever called it, and so do derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from unidist.keras import needs
from unidist.keras.jax import layouts, placing
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.strategies.distribution import adopt

Dims = Iterable[int]
# For the first operands and for what comes out: the dims that are to be whole.
Whole = tuple[list[Dims], Dims]


def hooks() -> Iterator[Hook]:
    """Each gives the primitive whole dims, or an operand of its own. jnp's functions bind them."""
    for primitive, dims, why, needed in _TABLE:
        yield Hook(f"jax.lax:{primitive}", "bind", _with_whole(dims), why, needed=needed)
    for primitive, needed in _BESIDE_ENDS:
        yield Hook(f"jax.lax:{primitive}", "bind", _of_its_own, "neighbours send each its own ends", needed=needed)


def _with_whole(dims_of: Callable[[Any, Any, Any], Whole]) -> Callable[..., Any]:
    @calling
    def binding(original: Any, *operands: Any, **params: Any) -> Any:
        mesh = _mesh_that_cuts(operands)
        if mesh is None:
            return original(*operands, **params)
        dims, of_results = dims_of(operands, params, mesh)
        given = [*map(functools.partial(_whole_along, mesh), operands, dims), *operands[len(dims) :]]
        in_order = _in_order if dims_of is _transformed else _same
        found = jax.tree.map(in_order, original(*map(in_order, given), **params))
        # What comes out too: the partitioner cuts an operation as its results are cut.
        return jax.tree.map(lambda result: _whole_along(mesh, result, of_results), found)

    return binding


@calling
def _of_its_own(original: Any, array: Any, *others: Any, **params: Any) -> Any:
    """Computes with an array that no other operation reads.

    XLA takes what neighbours send for one operation for another of the same array, with the numbers at its ends: minus
    infinity for a maximum over windows, zeros for a mean, and what a pad is given (zeros for a slice's derivative).
    """
    has_zeros = bool(others) and not isinstance(others[0], jax.core.Tracer) and not others[0]
    is_as_given = has_zeros or _mesh_that_cuts((array,)) is None
    return original(array if is_as_given else jax.lax.optimization_barrier(array), *others, **params)


def _mesh_that_cuts(operands: Iterable[Any]) -> Any:
    """The devices' mesh where XLA's partitioner cuts what is traced; else None."""
    distribution = placing.current()
    if distribution is None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    is_traced = any(isinstance(operand, jax.core.Tracer) for operand in operands)
    return distribution.device_mesh.backend_mesh if is_traced else None


def _whole_along(mesh: Any, array: Any, dims: Dims) -> Any:
    whole = tuple(dims)
    if not whole:
        return array
    spec = [None if dim in whole else PartitionSpec.UNCONSTRAINED for dim in range(array.ndim)]
    return jax.lax.with_sharding_constraint(array, layouts.named(mesh, *spec))


def _in_order(array: Any) -> Any:
    """The last dim's numbers lie side by side: what was gathered along it would lie otherwise."""
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _same(array: Any) -> Any:
    return array


def _sorted(operands: Any, params: Any, mesh: Any) -> Whole:
    """The sorted dim, where it does not divide: a ragged batch's rows, or what a layer left.

    The process ends ("spmd_partitioner_util.h: Check failed").
    """
    uneven = [dim for dim in _uneven(operands[0], mesh) if dim == params["dimension"]]
    return [uneven] * len(operands), uneven


def _transformed(operands: Any, params: Any, mesh: Any) -> Whole:
    """Parts are transformed, in an order that XLA does not run ("fft_thunk.cc: RET_CHECK failure")."""
    ndim = operands[0].ndim
    dims = range(ndim - len(params["fft_lengths"]), ndim)
    return [dims], dims


def _scattered(operands: Any, params: Any, mesh: Any) -> Whole:
    """Updates along dims that do not divide: XLA writes the places that it pads itself too.

    Where one place is written, the dims that it is in: devices that do not hold it write numbers of other places into
    theirs. XLA joins the slice that a device takes with the one that it reads, without the bounds between.
    """
    _, indices, updates = operands
    is_one = prod(indices.shape[:-1]) == 1
    dims = params["dimension_numbers"].scatter_dims_to_operand_dims if is_one else ()
    return [dims, _uneven(indices, mesh), _uneven(updates, mesh)], dims


def _uneven(array: Any, mesh: Any) -> list[int]:
    return [dim for dim, size in enumerate(array.shape) if size % mesh.size]


def _convolved(operands: Any, params: Any, mesh: Any) -> Whole:
    """Places that are cut, under a kernel that another axis cuts: what neighbours send is lost.

    No kernel is cut in a call where all axes are those of rows and of places.
    """
    strategy = adopt(placing.current()).strategy
    own = {*strategy.data_axes, *strategy.context_axes}
    if not any(size > 1 for axis, size in mesh.shape.items() if axis not in own):
        return [], ()
    numbers = params["dimension_numbers"]
    return [numbers.lhs_spec[2:], numbers.rhs_spec[2:]], numbers.out_spec[2:]


def _pooled(operands: Any, params: Any, mesh: Any) -> Whole:
    """The derivative of a maximum over windows that overlap: it gives to other places where they are cut."""
    dims = [dim for dim, size in enumerate(params["window_dimensions"]) if size > 1]
    return [dims, dims], dims


_SCATTERS = ("scatter_p", "scatter_add_p", "scatter_mul_p", "scatter_min_p", "scatter_max_p")
_OF_MAXIMA = ("select_and_gather_add_p", "select_and_scatter_add_p")
_BESIDE_ENDS = (("reduce_window_max_p", needs.pools), ("reduce_window_min_p", needs.pools), ("pad_p", needs.own_code))
_TABLE = (
    ("sort_p", _sorted, "places that do not divide are sorted whole", needs.own_code),
    ("fft_p", _transformed, "what is transformed is whole along those dims", needs.of_signals),
    ("conv_general_dilated_p", _convolved, "places are convolved whole where kernels are cut", needs.convolves),
    *((name, _scattered, "dims that do not divide are scattered whole", needs.own_code) for name in _SCATTERS),
    *((name, _pooled, "windows are whole where their maximum is derived", needs.pools) for name in _OF_MAXIMA),
)
