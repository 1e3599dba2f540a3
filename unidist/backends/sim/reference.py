"""The reference: every step and collective on NumPy arrays, one shard a rank, written for reading.

Independent of the fold in backends/local.py on purpose: every other adapter is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np

from unidist.algebra import Axes, Redistribution, Sharding, Step
from unidist.algebra.layout import ReduceOp
from unidist.backends.protocol import Array
from unidist.errors import LayoutError

Shards = dict[int, Array]

# max and min have none in every dtype: their contributions all hold the value instead.
NEUTRAL: dict[ReduceOp, int] = {"sum": 0, "mean": 0, "prod": 1}


def reduce(parts: list[Array], op: ReduceOp) -> Array:
    """Reduces arrays of one shape, in their dtype, in the order given. Of bool, sum is "or", prod "and"."""
    fold = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    out = parts[0].copy()
    # Of bfloat16 NumPy warns that the max of a NaN is a NaN.
    with np.errstate(invalid="ignore") if op in ("max", "min") else nullcontext():
        for part in parts[1:]:
            out = fold(out, part)
    return scale(out, 1 / len(parts)) if op == "mean" else out


def scale(value: Array, factor: float) -> Array:
    """value * factor in its own dtype. Raises LayoutError for integers and bool, which have no mean."""
    if value.dtype.kind in "biu":
        raise LayoutError(f"a mean of {value.dtype} values is no {value.dtype}: cast to a float, or use partial sums")
    return np.asarray(value * np.asarray(factor, value.dtype), value.dtype)


def distribute(value: Array, sharding: Sharding) -> Shards:
    """Each rank's region of the value.

    P(sum, prod): the value at place 0, the neutral element elsewhere; P(mean): n times the value at place 0;
    P(max, min): the value everywhere.
    """
    shards = {}
    for rank in sharding.mesh.devices:
        here = sharding.mesh.coordinate(rank)
        part = value[sharding.slices(rank)].copy()
        for axis, op in sharding.layout.partial:
            if op == "mean":
                part = scale(part, sharding.mesh.axis_size(axis))
            if here[axis] and op in NEUTRAL:
                part = np.full_like(part, NEUTRAL[op])
        shards[rank] = part
    return shards


def gather(shards: Mapping[int, Array], sharding: Sharding) -> Array:
    """The full value: partial axes reduced, the first replica of the others."""
    layout, mesh = sharding.layout, sharding.mesh
    out = np.zeros(sharding.shape, next(iter(shards.values())).dtype)
    for rank in mesh.devices:
        here = mesh.coordinate(rank)
        if not any(here[axis] for axis in mesh.axis_names if layout.state(axis) != "S"):
            out[sharding.slices(rank)] = _reduced(shards, sharding, rank)
    return out


def _reduced(shards: Mapping[int, Array], sharding: Sharding, rank: int) -> Array:
    mesh = sharding.mesh
    parts = {r: shards[r] for r in mesh.group(sharding.layout.partial_axes, rank).ranks}
    for axis, op in sharding.layout.partial:
        parts = {r: reduce([parts[q] for q in mesh.group(axis, r).ranks], op) for r in parts}
    return parts[rank]


def run(plan: Redistribution, shards: Mapping[int, Array]) -> Shards:
    out = dict(shards)
    for step in plan.steps:
        out = run_step(step, out)
    return out


def run_step(step: Step, shards: Mapping[int, Array]) -> Shards:
    """One step for all ranks at once: what each rank holds afterwards."""
    return {rank: _at_rank(step, shards, rank) for rank in step.before.mesh.devices}


def _at_rank(step: Step, shards: Mapping[int, Array], rank: int) -> Array:
    group = step.before.mesh.group(step.axes, rank)
    parts = [shards[r] for r in group.ranks]
    own = shards[rank]
    if step.op == "all_reduce":
        return reduce(parts, step.reduce)
    if step.op == "reduce_scatter":
        return _part_of(step.after, step.before, rank, reduce(parts, step.reduce))
    if step.op == "all_gather":
        return np.concatenate(parts, step.dim)
    if step.op == "all_to_all":
        whole = np.concatenate(parts, step.dim)
        joined = step.after.with_layout(step.before.layout.with_axis(step.axes, "I"))
        return _part_of(step.after, joined, rank, whole)
    if step.op == "slice":
        return _part_of(step.after, step.before, rank, own)
    if step.op == "embed":
        out = np.zeros(step.after.local_shape(rank), own.dtype)
        out[_relative(step.before, step.after, rank)] = own
        return out
    if step.op == "mask":
        return np.full_like(own, NEUTRAL[step.reduce]) if group.index and step.reduce in NEUTRAL else own
    if step.op == "scale":
        return scale(own, step.factor)
    return own


def _relative(inner: Sharding, outer: Sharding, rank: int) -> tuple[slice, ...]:
    return tuple(
        slice(lo - base, lo - base + n)
        for (lo, n), (base, _) in zip(inner.region(rank), outer.region(rank), strict=True)
    )


def _part_of(inner: Sharding, outer: Sharding, rank: int, value: Array) -> Array:
    return value[_relative(inner, outer, rank)]


def broadcast(shards: Mapping[int, Array], sharding: Sharding, axes: Axes, root: int) -> Shards:
    group = sharding.mesh.group
    return {rank: shards[group(axes, rank).ranks[root]].copy() for rank in sharding.mesh.devices}


def broadcast_adjoint(grads: Mapping[int, Array], sharding: Sharding, axes: Axes, root: int) -> Shards:
    """Returns a broadcast's gradient, of the gradients of its results.

    It is at the root, summed over the axes of F, along which they are contributions; zeros elsewhere.
    """
    group, fanned = sharding.mesh.group, tuple(axis for axis in axes if axis in sharding.layout.fanout)
    return {
        rank: reduce([grads[r] for r in group(fanned, rank).ranks], "sum")
        if group(axes, rank).index == root
        else np.zeros_like(grads[rank])
        for rank in sharding.mesh.devices
    }


def permute(shards: Mapping[int, Array], sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> Shards:
    out = {rank: np.zeros_like(shards[rank]) for rank in sharding.mesh.devices}
    for rank in sharding.mesh.devices:
        group = sharding.mesh.group(axes, rank)
        for source, destination in pairs:
            if destination == group.index:
                out[rank] = shards[group.ranks[source]].copy()
    return out
