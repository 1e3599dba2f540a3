"""Steps as programs: what each rank does in shard_map, and a plan's cached jit with its gradient.

A program is built once for a pair of shardings and the devices of their mesh, and serves all dtypes: jax.jit
knows these apart. Nothing is traced again for the same arguments.

Gradients. JAX's cotangent has the shape of the data, whatever the layout's dual is. For data at layout L it holds

    S, I     the gradient
    P        the gradient once for each contribution: on every device the same numbers as at F, the dual
    F        the sum of the gradient's contributions: a global replicated array has one gradient in JAX, the total, and
             what computed with the array has summed it already

so a redistribution's cotangent is redistributed without any reduction, by the plan between the layouts with P and F
read as I, times the factors of means. `as_cotangent` and `as_gradient` go between cotangents and data at L.dual().
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from unidist.algebra import Axes, Layout, Mesh, Redistribution, Sharding, Step, redistribution
from unidist.algebra.layout import ReduceOp
from unidist.backends.jax import remap
from unidist.backends.jax.arrays import data_shape, partition_spec
from unidist.errors import LayoutError

Move: TypeAlias = Callable[[jax.Array], jax.Array]


# Whole programs


def program_of(mesh: jax.sharding.Mesh, src: Sharding, dst: Sharding) -> Move:
    """Returns redistribution(src, dst) as a program: data at src -> data at dst.

    Its gradient is that of this module's text.
    """
    moves = redistribution(src, dst)
    if all(step.op == "retype" or _is_nothing(step) for step in moves.steps) and data_shape(src) == data_shape(dst):
        return _itself
    back = redistribution(_whole(dst), _whole(src))
    factor = prod(step.factor for step in moves.steps if step.op == "scale")
    return _with_adjoint(
        _program(mesh, partial(run, moves), src, dst),
        _program(mesh, lambda grad: run(back, _scaled(grad, factor)), dst, src),
        check=lambda: moves.adjoint,
    )


def broadcasting(mesh: jax.sharding.Mesh, sharding: Sharding, axes: Axes, root: int) -> Move:
    """Gives every place of a group what `root` holds.

    Gradient: to the root, zeros elsewhere; along axes of F the cotangent is the sum already, and stays the same
    everywhere.

    A sum over the group whose terms but the root's are zeros: XLA on CPU has no broadcast of its own. Of floats
    their bits are summed: with 0 the float -0 would become 0.
    """
    grid = sharding.mesh
    there = grid.coordinate(grid.group(axes, grid.devices[0]).ranks[root])
    invariant = tuple(axis for axis in axes if axis not in sharding.layout.fanout)

    def only_at(places: Axes, x: jax.Array) -> jax.Array:
        here = [lax.axis_index(axis) == there[axis] for axis in places]
        return jnp.where(jnp.stack(here).all(), x, jnp.zeros_like(x)) if here else x

    def forward(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return all_reduce(only_at(axes, x), axes, "sum")
        bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(all_reduce(only_at(axes, bits), axes, "sum"), x.dtype)

    def backward(grad: jax.Array) -> jax.Array:
        return only_at(invariant, grad)

    return _with_adjoint(
        _program(mesh, forward, sharding, sharding), _program(mesh, backward, sharding, sharding), check=_always
    )


def permutation(mesh: jax.sharding.Mesh, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> Move:
    """Shards move from place to place; places that receive none hold zeros. Gradient: the pairs reversed.

    lax.ppermute numbers places in the mesh's order of the axes, in whatever order they are named.
    """
    ordered = tuple(name for name in sharding.mesh.axis_names if name in axes)
    place = _places(sharding.mesh, axes, ordered)
    there = tuple((place[source], place[destination]) for source, destination in pairs)

    def moving(by: tuple[tuple[int, int], ...]) -> Move:
        body = partial(lax.ppermute, axis_name=ordered, perm=by) if by else jnp.zeros_like
        return _program(mesh, body, sharding, sharding)

    back = tuple((destination, source) for source, destination in there)
    return _with_adjoint(moving(there), moving(back), check=_always)


def _places(mesh: Mesh, axes: Axes, ordered: Axes) -> list[int]:
    """For each place along `axes` the place of the same rank along the same axes in another order."""
    first = mesh.devices[0]
    others = mesh.group(ordered, first).ranks
    return [others.index(rank) for rank in mesh.group(axes, first).ranks]


def as_gradient(mesh: jax.sharding.Mesh, sharding: Sharding) -> Move:
    """Turns JAX's cotangent at `sharding` into data at the dual. A fanned-out axis holds it at place 0."""
    fanout = sharding.layout.fanout
    dual = sharding.with_layout(sharding.layout.dual())

    def body(grad: jax.Array) -> jax.Array:
        return jnp.where(lax.axis_index(fanout) == 0, grad, jnp.zeros_like(grad)) if fanout else grad

    return jax.jit(_program(mesh, body, sharding, dual))


def as_cotangent(mesh: jax.sharding.Mesh, sharding: Sharding) -> Move:
    """Data at the dual of `sharding` -> JAX's cotangent of data there: sums over the fanned-out axes."""
    fanout = sharding.layout.fanout
    dual = sharding.with_layout(sharding.layout.dual())
    return jax.jit(_program(mesh, lambda grad: all_reduce(grad, fanout, "sum") if fanout else grad, dual, sharding))


def _program(mesh: jax.sharding.Mesh, body: Move, src: Sharding, dst: Sharding) -> Move:
    """`body` maps a rank's padded part at src to its part at dst; the program maps the global arrays."""
    shape, native = data_shape(dst), NamedSharding(mesh, partition_spec(dst))
    if prod(src.shape) == 0:
        return jax.jit(lambda x: jnp.zeros(shape, x.dtype), out_shardings=native)
    skipped, added = len(src.layout.partial), (1,) * len(dst.layout.partial)

    def local(x: jax.Array) -> jax.Array:
        out = body(x.reshape(x.shape[skipped:]))
        return out.reshape(added + out.shape)

    # Replicas may differ (a broadcast's input), and what all_gather returns is not known to be equal: nothing to check.
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=partition_spec(src), out_specs=partition_spec(dst), check_vma=False
    )
    return jax.jit(mapped, out_shardings=native)


def _with_adjoint(forward: Move, backward: Move, check: Callable[[], object]) -> Move:
    """Returns a jitted linear program with the gradient `backward`, whose own gradient is `forward`.

    `check` raises where there is no gradient; it is called when one is asked for.
    """
    there: Any = jax.custom_vjp(forward)
    back: Any = jax.custom_vjp(backward)

    def keep(x: jax.Array) -> tuple[jax.Array, None]:
        check()
        return there(x), None

    there.defvjp(keep, lambda _, grad: (back(grad),))
    back.defvjp(lambda grad: (back(grad), None), lambda _, x: (there(x),))
    compiled: Move = jax.jit(there)
    return compiled


def _always() -> None:
    """Broadcasts and permutations are linear."""


def _itself(x: jax.Array) -> jax.Array:
    return x


def _whole(sharding: Sharding) -> Sharding:
    return sharding.with_layout(Layout(*sharding.layout.dims))


def _is_nothing(step: Step) -> bool:
    return step.group_size == 1 and step.op != "scale"


# One rank's part of each step, inside shard_map


def run(moves: Redistribution, x: jax.Array) -> jax.Array:
    """The plan's steps on a rank's padded part."""
    for step in moves.steps:
        if not _is_nothing(step):
            x = _RULES[step.op](step, x)
    return x


def _all_reduce(step: Step, x: jax.Array) -> jax.Array:
    return all_reduce(x, step.axes, step.reduce)


def _reduce_scatter(step: Step, x: jax.Array) -> jax.Array:
    how = remap.cuts(step.after, step.dim, step.axes)
    return reduce_scatter(remap.spread(x, step.dim, how), step.axes, step.dim, step.reduce)


def _all_gather(step: Step, x: jax.Array) -> jax.Array:
    how = remap.cuts(step.before, step.dim, step.axes)
    return remap.join(lax.all_gather(x, step.axes, axis=step.dim, tiled=True), step.dim, how)


def _all_to_all(step: Step, x: jax.Array) -> jax.Array:
    x = remap.spread(x, step.to, remap.cuts(step.after, step.to, step.axes))
    x = lax.all_to_all(x, step.axes, split_axis=step.to, concat_axis=step.dim, tiled=True)
    return remap.join(x, step.dim, remap.cuts(step.before, step.dim, step.axes))


def _slice(step: Step, x: jax.Array) -> jax.Array:
    return remap.own_piece(x, step.dim, remap.cuts(step.after, step.dim, step.axes))


def _embed(step: Step, x: jax.Array) -> jax.Array:
    return remap.among_zeros(x, step.dim, remap.cuts(step.before, step.dim, step.axes))


def _mask(step: Step, x: jax.Array) -> jax.Array:
    if step.reduce in ("max", "min"):
        return x
    neutral = jnp.ones_like(x) if step.reduce == "prod" else jnp.zeros_like(x)
    return jnp.where(lax.axis_index(step.axes) == 0, x, neutral)


def _scale(step: Step, x: jax.Array) -> jax.Array:
    return _scaled(x, step.factor)


def _retype(step: Step, x: jax.Array) -> jax.Array:
    return x


_RULES: dict[str, Callable[[Step, jax.Array], jax.Array]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "embed": _embed,
    "mask": _mask,
    "scale": _scale,
    "retype": _retype,
}


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    if factor == 1:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise LayoutError(f"a mean of {x.dtype} values is no {x.dtype}: cast to a float, or use partial sums")
    return x * jnp.asarray(factor, x.dtype)


# Reductions. By mean none: a plan scales before or behind a sum.


def all_reduce(x: jax.Array, axes: Axes, op: ReduceOp) -> jax.Array:
    """Returns the reduced value on every rank of the group, in the dtype of x.

    Of bool, sum is "or" and prod "and".
    """
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint8)
        most: jax.Array = lax.pmax(bits, axes) if op in ("sum", "max") else lax.pmin(bits, axes)
        return most.astype(jnp.bool_)
    if op == "sum":
        total: jax.Array = lax.psum(x, axes)
        return total
    if op == "prod" or jnp.issubdtype(x.dtype, jnp.floating):
        return _all_reduce_in_parts(x, axes, op)
    extreme: jax.Array = lax.pmax(x, axes) if op == "max" else lax.pmin(x, axes)
    return extreme


def _all_reduce_in_parts(x: jax.Array, axes: Axes, op: ReduceOp) -> jax.Array:
    """Reduces where XLA lacks the reduction (prod), or its all-reduce loses NaN (max and min of floats).

    Each rank reduces one part of all, then they are joined. Sends 2(n-1)/n of x, as a ring does.
    """
    count = lax.axis_size(axes)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
    own = reduce_scatter(flat, axes, 0, op)
    joined: jax.Array = lax.all_gather(own, axes, axis=0, tiled=True)
    return joined[: x.size].reshape(x.shape)


def reduce_scatter(x: jax.Array, axes: Axes, dim: int, op: ReduceOp) -> jax.Array:
    """This rank's part along `dim`, which the group divides, of the reduced value."""
    if op == "sum" and x.dtype != jnp.bool_:
        total: jax.Array = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return total
    count = lax.axis_size(axes)
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]), dim, 0)
    return _folded(lax.all_to_all(parts, axes, 0, 0, tiled=True), op)


def _folded(parts: jax.Array, op: ReduceOp) -> jax.Array:
    if parts.dtype == jnp.bool_:
        return parts.any(0) if op in ("sum", "max") else parts.all(0)
    if op == "prod":
        return jnp.prod(parts, axis=0).astype(parts.dtype)
    return parts.max(0) if op == "max" else parts.min(0)
