"""Computes each kernel of a stack on the rows that it has a weight for, in a program of static shapes.

Rows are sorted by kernel and go through in blocks. How many blocks there are is known in a step alone: a loop goes on
until none is left. So no row is dropped, no buffer can be full, and as many weights as there are may not be zero. What
backward needs of a block is computed again there.

On a mesh each device computes its own kernels, of the rows of its data shard. Where axes cut both kernels and rows,
rows are gathered along these, and sums are scattered.

Source: Gale et al. 2022, "MegaBlocks", arXiv:2211.15841, for blocks of rows of one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from unidist.algebra import Axes
from unidist.keras.jax.layouts import places

# (values of the layer's variables, rows) -> what kernels make of rows, (kernels, rows, ...).
Program = Callable[[Sequence[Any], Any], Any]


def block_size(rows: int, kernels: int) -> int:
    """Returns how many rows a block has: a half of an equal share, so that little else is computed."""
    return max(1, min(rows, max(8, rows // (2 * max(kernels, 1)))))


@dataclass(frozen=True, eq=False)
class Plan:
    """Says how a layer's rows are computed.

    Attributes:
        one: the layer with one kernel of each stacked variable, and rows of a block.
        stacked: which of its variables are stacked.
        size: rows of a block.
        mesh: JAX's mesh; None: one device.
        kernels, rows: the axes that cut kernels, and rows.
    """

    one: Program
    stacked: tuple[bool, ...]
    size: int
    mesh: Mesh | None = None
    kernels: Axes = ()
    rows: Axes = ()

    @property
    def both(self) -> Axes:
        """The axes that cut kernels and rows."""
        return tuple(axis for axis in self.rows if axis in self.kernels)


def summed(plan: Plan, values: Sequence[Any], rows: Any, weights: Any) -> Any:
    """The sum over kernels of what each makes of a row, times its weight: (rows, ...).

    Args:
        values: of all the layer's variables. rows: (rows, ...). weights: (kernels, rows).
    """
    if plan.mesh is None:
        return _own(plan)(tuple(values), rows, weights)
    missing = -len(rows) % places(plan.mesh, plan.rows)
    padded = (jnp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)]), jnp.pad(weights, [(0, 0), (0, missing)]))
    return _on_mesh(plan)(tuple(values), *padded)[: len(rows)]


def _on_mesh(plan: Plan) -> Any:
    """The same on all devices, with the gradients that belong to it."""
    kernels, rows = PartitionSpec(plan.kernels), PartitionSpec(plan.rows)
    weights = PartitionSpec(None if plan.both else plan.kernels, plan.rows)
    takes = tuple(kernels if own else PartitionSpec() for own in plan.stacked), rows, weights
    mapped = functools.partial(jax.shard_map, mesh=plan.mesh, check_vma=False)
    forward = mapped(functools.partial(_forward, plan), in_specs=takes, out_specs=rows)
    backward = mapped(functools.partial(_backward, plan), in_specs=(*takes, rows), out_specs=takes)

    @jax.custom_vjp
    def call(values: Any, rows: Any, weights: Any) -> Any:
        return forward(values, rows, weights)

    call.defvjp(lambda *given: (forward(*given), given), lambda given, grad: backward(*given, grad))
    return call


def _forward(plan: Plan, values: Any, rows: Any, weights: Any) -> Any:
    rows, weights = _gathered(plan, rows), _own_weights(plan, weights)
    return _scattered(plan, _sums(plan, values, rows, weights))


def _backward(plan: Plan, values: Any, rows: Any, weights: Any, grad: Any) -> Any:
    seen = _gathered(plan, rows), _own_weights(plan, weights)
    of_values, of_rows, of_weights = _gradients(plan, (values, *seen), _gathered(plan, grad))
    every = tuple(axis for axis in plan.mesh.axis_names if axis in (*plan.kernels, *plan.rows))  # type: ignore[union-attr]
    left = tuple(axis for axis in plan.rows if axis not in plan.both)
    of_values = tuple(_sum(x, left if own else every) for x, own in zip(of_values, plan.stacked, strict=True))
    return of_values, _scattered(plan, of_rows), _weights_of_all(plan, of_weights, weights.shape[0])


def _gathered(plan: Plan, x: Any) -> Any:
    return jax.lax.all_gather(x, plan.both, axis=0, tiled=True) if plan.both else x


def _scattered(plan: Plan, x: Any) -> Any:
    """Sums rows over the devices of all kernels, and leaves this device's own."""
    x = _sum(x, tuple(axis for axis in plan.kernels if axis not in plan.both))
    return jax.lax.psum_scatter(x, plan.both, scatter_dimension=0, tiled=True) if plan.both else x


def _sum(x: Any, axes: Axes) -> Any:
    return jax.lax.psum(x, axes) if axes else x


def _own_weights(plan: Plan, weights: Any) -> Any:
    """This device's kernels' weights of the rows that it computes."""
    if not plan.both:
        return weights
    own = weights.shape[0] // places(plan.mesh, plan.kernels)
    weights = jax.lax.all_gather(weights, plan.both, axis=1, tiled=True)
    return jax.lax.dynamic_slice_in_dim(weights, jax.lax.axis_index(plan.kernels) * own, own, 0)


def _weights_of_all(plan: Plan, own: Any, kernels: int) -> Any:
    """The adjoint of `_own_weights`."""
    if not plan.both:
        return own
    whole, place = jnp.zeros((kernels, own.shape[1]), own.dtype), jax.lax.axis_index(plan.kernels)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, own, place * own.shape[0], 0)
    whole = _sum(whole, tuple(axis for axis in plan.kernels if axis not in plan.both))
    return jax.lax.psum_scatter(whole, plan.both, scatter_dimension=1, tiled=True)


# on one device --------------------------------------------------------------------------------------------------------


def _own(plan: Plan) -> Any:
    @jax.custom_vjp
    def call(values: Any, rows: Any, weights: Any) -> Any:
        return _sums(plan, values, rows, weights)

    call.defvjp(lambda *given: (_sums(plan, *given), given), lambda given, grad: _gradients(plan, given, grad))
    return call


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The rows of each kernel, in blocks.

    Attributes:
        order: (kernels, rows): of each kernel its rows first. counts: how many these are.
        ends: of each kernel, how many blocks there are up to its last one.
    """

    order: Any
    counts: Any
    ends: Any
    size: int

    @classmethod
    def of(cls, weights: Any, size: int) -> _Blocks:
        chosen = weights != 0
        counts = chosen.sum(1)
        return cls(jnp.argsort(~chosen, axis=1, stable=True), counts, jnp.cumsum(-(-counts // size)), size)

    def at(self, k: Any) -> tuple[Any, Any, Any]:
        """(kernel, rows, which of them count) of a block; what is left of one is filled with its last row."""
        kernel = jnp.searchsorted(self.ends, k, side="right")
        before = jnp.where(kernel > 0, self.ends[kernel - 1], 0)
        places = (k - before) * self.size + jnp.arange(self.size)
        count = self.counts[kernel]
        return kernel, self.order[kernel, jnp.minimum(places, count - 1)], places < count


def _sums(plan: Plan, values: Any, rows: Any, weights: Any) -> Any:
    blocks, shape = _Blocks.of(weights, plan.size), _shape(plan, values, rows)

    def body(k: Any, total: Any) -> Any:
        kernel, at, counts = blocks.at(k)
        made = plan.one(_of_kernel(plan, values, kernel), rows[at])[0]
        part = _where(counts, made * _along(weights[kernel, at], made))
        return total.at[at].add(part)

    zeros = jnp.zeros((len(rows), *shape.shape[2:]), shape.dtype)
    return jax.lax.fori_loop(0, blocks.ends[-1], body, zeros)


def _gradients(plan: Plan, given: Any, grad: Any) -> Any:
    values, rows, weights = given
    blocks = _Blocks.of(weights, plan.size)

    def body(k: Any, total: Any) -> Any:
        of_values, of_rows, of_weights = total
        kernel, at, counts = blocks.at(k)
        made, back = jax.vjp(plan.one, _of_kernel(plan, values, kernel), rows[at])
        above = _where(counts, grad[at])
        own, part = back((above * _along(weights[kernel, at], above))[None].astype(made.dtype))
        of_values = tuple(
            x.at[kernel].add(new[0]) if stacked else x + new
            for x, new, stacked in zip(of_values, own, plan.stacked, strict=True)
        )
        of_weight = (above * made[0]).reshape(plan.size, -1).sum(1).astype(weights.dtype)
        return of_values, of_rows.at[at].add(part), of_weights.at[kernel, at].add(of_weight)

    return jax.lax.fori_loop(0, blocks.ends[-1], body, jax.tree.map(jnp.zeros_like, (tuple(values), rows, weights)))


def _of_kernel(plan: Plan, values: Any, kernel: Any) -> tuple[Any, ...]:
    return tuple(
        jax.lax.dynamic_slice_in_dim(x, kernel, 1, 0) if stacked else x
        for x, stacked in zip(values, plan.stacked, strict=True)
    )


def _shape(plan: Plan, values: Any, rows: Any) -> Any:
    return jax.eval_shape(plan.one, _of_kernel(plan, values, 0), rows[: plan.size])


def _where(counts: Any, x: Any) -> Any:
    return jnp.where(_along(counts, x), x, jnp.zeros((), x.dtype))


def _along(of_rows: Any, x: Any) -> Any:
    return of_rows.reshape(-1, *[1] * (x.ndim - 1))
