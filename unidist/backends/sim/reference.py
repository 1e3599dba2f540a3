"""The reference: every step and collective on NumPy arrays, one shard a rank, written for reading.

Independent of the fold in backends/local.py on purpose: every other adapter is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unidist.algebra import Axes, Plan, Sharding, Step
from unidist.algebra.layout import ReduceOp
from unidist.backends.protocol import Array

Shards = dict[int, Array]

NEUTRAL: dict[ReduceOp, float] = {"sum": 0, "mean": 0, "prod": 1, "max": -np.inf, "min": np.inf}


def reduce(parts: list[Array], op: ReduceOp) -> Array:
    """Reduces arrays of one shape, in their own dtype, in rank order."""
    if op in ("sum", "mean"):
        total = parts[0]
        for part in parts[1:]:
            total = total | part if total.dtype == bool else total + part
        return total if op == "sum" else (total / np.asarray(len(parts), total.dtype)).astype(total.dtype)
    fold = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    out = parts[0]
    for part in parts[1:]:
        out = fold(out, part)
    return out


def distribute(value: Array, sharding: Sharding) -> Shards:
    """Each rank's region of the value; P: the value at place 0, the neutral element elsewhere."""
    shards = {}
    for rank in sharding.mesh.devices:
        here = sharding.mesh.coordinate(rank)
        part = value[sharding.slices(rank)].copy()
        for axis, op in sharding.layout.partial:
            if here[axis] and op in ("sum", "prod"):
                part = np.full_like(part, NEUTRAL[op])
        shards[rank] = part
    return shards


def gather(shards: Mapping[int, Array], sharding: Sharding) -> Array:
    """The full value: partial axes reduced, the first replica of the others."""
    first = next(iter(shards.values()))
    out = np.zeros(sharding.shape, first.dtype)
    layout, mesh = sharding.layout, sharding.mesh
    for rank in mesh.devices:
        here = mesh.coordinate(rank)
        if any(here[axis] for axis in mesh.axis_names if layout.state(axis) != "S"):
            continue
        # Reduced one axis at a time: the ops of several axes may differ.
        parts = {rank_: shards[rank_] for rank_ in mesh.group(layout.partial_axes, rank).ranks}
        for axis, op in layout.partial:
            parts = {
                r: reduce([parts[q] for q in mesh.group(axis, r).ranks], op)
                for r in parts
                if mesh.coordinate(r)[axis] == 0 or True
            }
        out[sharding.slices(rank)] = parts[rank]
    return out


def run(plan: Plan, shards: Mapping[int, Array]) -> Shards:
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
        kept = group.index == 0 or step.reduce not in ("sum", "prod")
        return own if kept else np.full_like(own, NEUTRAL[step.reduce])
    if step.op == "scale":
        return (own * np.asarray(step.factor, own.dtype)).astype(own.dtype)
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


def permute(
    shards: Mapping[int, Array], sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]
) -> Shards:
    out = {rank: np.zeros_like(shards[rank]) for rank in sharding.mesh.devices}
    for rank in sharding.mesh.devices:
        group = sharding.mesh.group(axes, rank)
        for source, destination in pairs:
            if destination == group.index:
                out[rank] = shards[group.ranks[source]].copy()
    return out
