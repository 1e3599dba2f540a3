"""Layouts and random legal shards for tests: what a sharding allows, drawn without the tested code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.algebra.layout import ReduceOp
from unidist.backends.protocol import Array

_FOLD: dict[ReduceOp, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def layouts(axes: Axes, ndim: int, *, op: ReduceOp = "sum") -> Iterator[Layout]:
    """Yields every layout of `ndim` dims over the axes: each in S(dim), P(op), I or F.

    Axes of one dim are in every order.
    """
    for states in itertools.product((*range(ndim), "P", "I", "F"), repeat=len(axes)):
        chosen = dict(zip(axes, states, strict=True))
        orders = [itertools.permutations([a for a in axes if chosen[a] == dim]) for dim in range(ndim)]
        partial: dict[str, ReduceOp] = {a: op for a in axes if chosen[a] == "P"}
        fanout = tuple(a for a in axes if chosen[a] == "F")
        for dims in itertools.product(*orders):
            yield Layout(*dims, partial=partial, fanout=fanout)


def pairs(kinds: Sequence[Layout], count: int, rng: np.random.Generator) -> list[tuple[Layout, Layout]]:
    """`count` pairs in which every layout is source and target as often as the others."""
    found: list[tuple[Layout, Layout]] = []
    while len(found) < count:
        targets = rng.permutation(len(kinds))
        sources = rng.permutation(len(kinds))
        found += [(kinds[s], kinds[t]) for s, t in zip(sources, targets, strict=True)]
    return found[:count]


def draw(shape: Sequence[int], dtype: str, rng: np.random.Generator, *, op: ReduceOp = "sum") -> Array:
    """Draws random values whose reductions are exact in the dtype.

    They are small whole numbers; for prod 1, 2 and (signed) -1.
    """
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape)).astype(bool)
    signed = not dtype.startswith("uint")
    if op == "prod":
        numbers = rng.choice([1, 2, -1] if signed else [1, 2], size=tuple(shape))
    else:
        numbers = rng.integers(-4 if signed else 0, 5, shape)
    return np.asarray(numbers).astype(dtype)


def legal_shards(
    sharding: Sharding, rng: np.random.Generator, dtype: str = "float64"
) -> tuple[Array, dict[int, Array]]:
    """Returns a random global value and what each rank may hold of it.

    Contributions are random along P, equal along I and F.
    """
    mesh, layout = sharding.mesh, sharding.layout
    ops = [op for _, op in layout.partial]
    whole = draw(
        [mesh.axis_size(axis) for axis in layout.partial_axes] + list(sharding.shape),
        dtype,
        rng,
        op=ops[0] if ops else "sum",
    )
    shards = {}
    for rank in mesh.devices:
        here = mesh.coordinate(rank)
        contribution = whole[tuple(here[axis] for axis in layout.partial_axes)]
        shards[rank] = np.array(contribution[nested_chunks(sharding, rank)])
    value = whole
    for op in ops:
        value = np.any(value, axis=0) if dtype == "bool" else _FOLD[op](value, axis=0)
    return np.asarray(value).astype(dtype), shards


def nested_chunks(sharding: Sharding, rank: int) -> tuple[slice, ...]:
    """Returns a rank's part by chunking axis by axis, major first: torch.chunk's rule in the open."""
    here, slices = sharding.mesh.coordinate(rank), []
    for dim, size in enumerate(sharding.shape):
        held = np.arange(size)
        for axis in sharding.layout.dim_axes(dim):
            step = -(-len(held) // sharding.mesh.axis_size(axis))
            held = held[here[axis] * step : (here[axis] + 1) * step]
        slices.append(slice(int(held[0]), int(held[-1]) + 1) if len(held) else slice(0, 0))
    return tuple(slices)


def product(u: dict[int, Array], v: dict[int, Array], sharding: Sharding) -> float:
    """<u, v> of shards at `sharding` and at its dual: over all ranks, counting once what is invariant."""
    layout, mesh = sharding.layout, sharding.mesh
    total = 0.0
    for rank in mesh.devices:
        here = mesh.coordinate(rank)
        if not any(here[axis] for axis in mesh.axis_names if layout.state(axis) == "I"):
            total += float(np.vdot(u[rank], v[rank]))
    return total


def meshes(count: int) -> list[Mesh]:
    """Returns meshes that fill a world of `count` devices.

    They are 1-D and 2-D, in rank order and permuted, and with an axis of 1.
    """
    order = [*range(1, count, 2), *range(0, count, 2)]
    minor = next((n for n in range(2, count) if count % n == 0), 1)
    flat, square = {"x": count}, {"data": count // minor, "model": minor}
    found = [Mesh(flat), Mesh(flat, list(reversed(range(count)))), Mesh(square), Mesh(square, order)]
    return [*found, Mesh({"one": 1, "x": count})] if minor > 1 else found
