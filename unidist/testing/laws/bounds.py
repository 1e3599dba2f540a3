"""Gradients by the framework's own autodiff; dtypes; errors and barriers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unidist import array
from unidist.algebra import Layout, Mesh, Sharding, redistribution
from unidist.algebra.layout import ReduceOp
from unidist.backends.protocol import ALL_DTYPES, dtype_name
from unidist.backends.sim import reference
from unidist.errors import CapabilityError, LayoutError, MeshError
from unidist.testing import samples
from unidist.testing.laws.moving import permutations
from unidist.testing.laws.world import World, cases, holds, law, raises, same


@law
def check_gradients(world: World) -> None:
    """The framework's own autodiff gives A* y, and <A x, y> = <x, A* y>."""
    vjp = _vjp(world)
    for src, dst, rng in cases(world, [(2 * world.size, world.size), (5, 3)]):
        back_src, back_dst = (s.with_layout(s.layout.dual()) for s in (src, dst))
        _, x = samples.legal_shards(src, rng, world.dtype)
        _, y = samples.legal_shards(back_dst, rng, world.dtype)
        gradient = vjp(_redistribution(world, src, dst), world.place(x, src), world.place(y, back_dst))
        wanted = reference.run(redistribution(src, dst).adjoint, y)
        holds(world, gradient, back_src, wanted, f"gradient of {src.layout} -> {dst.layout}")
        left = samples.product(reference.run(redistribution(src, dst), x), y, dst)
        assert left == samples.product(x, wanted, src), "the reference broke the adjoint law"


def _vjp(world: World) -> Callable[[Callable[[Any], Any], Any, Any], Any]:
    assert world.vjp is not None, "without World(vjp=...) leave this law out: ConformanceSuite.differentiable = False"
    return world.vjp


def _redistribution(world: World, src: Sharding, dst: Sharding) -> Callable[[Any], Any]:
    return lambda x: world.backend.redistribute(x, src, dst)


@law
def check_gradients_of_broadcast_and_permute(world: World) -> None:
    vjp = _vjp(world)
    rng = np.random.default_rng(8)
    for mesh, sharding, axes, pairs in permutations(world):
        _, x = samples.legal_shards(sharding, rng, world.dtype)
        _, y = samples.legal_shards(sharding, rng, world.dtype)
        placed = world.place(x, sharding), world.place(y, sharding)
        gradient = vjp(_permutation(world, sharding, axes, pairs), *placed)
        back = tuple((destination, source) for source, destination in pairs)
        holds(world, gradient, sharding, reference.permute(y, sharding, axes, back), f"gradient of permute {pairs}")
        # Once for each mesh and axes what is fanned out; along some axes only where each rank's part is looked at:
        # which replica a gather takes is nowhere said, and those of a gradient that is all at the root differ.
        fanout = () if pairs else axes[-1:] if world.backend.capabilities.view == "local" else axes
        whole = sharding.with_layout(Layout(fanout=fanout))
        dual, root = whole.with_layout(whole.layout.dual()), mesh.axis_size(axes) - 1
        _, x = samples.legal_shards(whole, rng, world.dtype)
        _, y = samples.legal_shards(dual, rng, world.dtype)
        gradient = vjp(_broadcasting(world, whole, axes, root), world.place(x, whole), world.place(y, dual))
        wanted = reference.broadcast_adjoint(y, whole, axes, root)
        holds(world, gradient, dual, wanted, f"gradient of broadcast from {root}")


def _permutation(world: World, sharding: Sharding, axes: Any, pairs: Any) -> Callable[[Any], Any]:
    return lambda x: world.backend.permute(x, sharding, axes, pairs)


def _broadcasting(world: World, sharding: Sharding, axes: Any, root: int) -> Callable[[Any], Any]:
    return lambda x: world.backend.broadcast(x, sharding, axes, root)


@law
def check_dtypes(world: World) -> None:
    ops: list[ReduceOp] = [op for op in ("sum", "max") if op in world.backend.capabilities.reduce_ops]
    for dtype in sorted(world.backend.capabilities.dtypes):
        _moves_dtype(world, dtype, [op for op in ops if dtype != "bool" or op == "sum"])


def _moves_dtype(world: World, dtype: str, ops: Sequence[ReduceOp]) -> None:
    mesh, rng = samples.meshes(world.size)[-1], np.random.default_rng(9)
    axis = max(mesh.axis_names, key=mesh.axis_size)  # of a prime number of devices another one has one place
    # What NumPy does not know is drawn in float32: small whole numbers are the same in both.
    carrier = "float32" if dtype == "bfloat16" else dtype
    ways = [(Layout(axis), Layout()), (Layout(axis), Layout(None, axis)), (Layout(), Layout(None, axis))]
    for op in ops:
        partial = Layout(partial={axis: op})
        ways += [(partial, Layout()), (partial, Layout(axis)), (Layout(fanout=axis), partial)]
    for first, last in ways:
        src, dst = (Sharding(mesh, layout, (5, 4)) for layout in (first, last))
        _, shards = samples.legal_shards(src, rng, carrier)
        x = world.place(shards, src, dtype)
        out = world.backend.redistribute(x, src, dst)
        for shard in world.backend.to_local(out, dst).values():
            assert dtype_name(shard) == dtype, f"{first} -> {last} made {dtype_name(shard)} of {dtype}"
        holds(world, out, dst, reference.run(redistribution(src, dst), shards), f"{dtype}, {first} ->")


@law
def check_nans(world: World) -> None:
    """max and min give NaN where any contribution is NaN, as NumPy's do, however large the array is."""
    capabilities = world.backend.capabilities
    extremes: tuple[ReduceOp, ...] = ("max", "min")
    ops = [op for op in extremes if op in capabilities.reduce_ops]
    floats = sorted(name for name in capabilities.dtypes if "float" in name)
    for dtype, op in zip(floats, itertools.cycle(ops), strict=False):
        _keeps_nans(world, dtype, op, Layout())
    for op in ops:
        _keeps_nans(world, world.dtype, op, Layout("x"))


def _keeps_nans(world: World, dtype: str, op: ReduceOp, layout: Layout) -> None:
    mesh, rng = Mesh({"x": world.size}), np.random.default_rng(10)
    src = Sharding(mesh, Layout(partial={"x": op}), (70_001,))  # more than adapters send in one message
    _, shards = samples.legal_shards(src, rng, "float32")
    for rank, shard in shards.items():
        shard[rank :: 2 * world.size + 1] = np.nan
    fold = {"max": np.max, "min": np.min}[op]
    wanted, dst = fold(np.stack([*shards.values()]), axis=0), src.with_layout(layout)
    x = world.backend.redistribute(world.place(shards, src, dtype), src, dst)
    holds(world, x, dst, {r: wanted[dst.slices(r)] for r in mesh.devices}, f"NaN in {dtype} by {op}")


@law
def check_dtypes_that_are_not_declared(world: World) -> None:
    mesh = Mesh({"x": world.size})
    for dtype in sorted(ALL_DTYPES - world.backend.capabilities.dtypes - {"bfloat16"}):
        value = np.ones((world.size, 2), dtype)
        raises(
            CapabilityError,
            f"{world.backend.name} {dtype} cast",
            lambda value=value: array.distribute(value, mesh, Layout("x")).redistribute(Layout()),  # type: ignore[misc]
        )
    whole = world.array(np.ones(world.size, "int32"), "int32") if "int32" in world.backend.capabilities.dtypes else None
    if whole is not None and "mean" in world.backend.capabilities.reduce_ops:
        mean = Layout(partial={"x": "mean"})
        raises(LayoutError, "mean int32", lambda: array.distribute(whole, mesh, mean))


@law
def check_errors(world: World) -> None:
    n, backend = world.size, world.backend
    mesh = Mesh({"x": n})
    rows = Sharding(mesh, Layout("x"), (n, 2))
    value, ranks = np.ones((n, 2), world.dtype), backend.local_ranks()
    good = [world.array(value[:1], world.dtype) for _ in ranks]
    raises(LayoutError, f"({n}, 3) ({n}, 2)", lambda: backend.distribute(np.ones((n, 3), world.dtype), rows))
    raises(LayoutError, f"{len(ranks)} shards", lambda: backend.from_local([*good, good[0]], rows))
    wide = [world.array(np.ones((1, 3), world.dtype), world.dtype) for _ in ranks]
    raises(LayoutError, f"rank {ranks[0]} (1, 3) (1, 2)", lambda: backend.from_local(wide, rows))
    if len(good) > 1:
        mixed = [*good[1:], world.array(value[:1], "int32")]
        raises(LayoutError, f"int32 {world.dtype} cast", lambda: backend.from_local(mixed, rows))
    beyond = Mesh({"x": n + 1})
    raises(MeshError, f"{n} devices", lambda: backend.mesh(beyond))
    raises(MeshError, f"{n} devices", lambda: array.distribute(np.ones(n + 1, world.dtype), beyond, Layout("x")))
    raises(CapabilityError, "object cast", lambda: backend.distribute(np.full((n, 2), None), rows))
    raises(LayoutError, "no list", lambda: array.distribute([[1.0, 2.0], [3.0]], mesh))
    x = array.distribute(value, mesh, Layout("x"))
    raises(LayoutError, "all_reduce partial", lambda: array.all_reduce(x, "x"))
    raises(LayoutError, "all_gather sharded", lambda: array.all_gather(array.all_gather(x, "x"), "x"))
    raises(LayoutError, "axis 'y'", lambda: x.redistribute(Layout("y")))
    raises(LayoutError, "dim 2", lambda: x.redistribute(Layout(None, None, "x")))
    raises(MeshError, "unknown 'y'", lambda: array.all_gather(x, "y"))
    # The world is still in step after all these refusals.
    same(x.numpy(), value, "after the errors")


@law
def check_barrier(world: World) -> None:
    world.backend.barrier()
    for mesh in samples.meshes(world.size):
        array.barrier(mesh=mesh)
        for axis in mesh.axis_names:
            array.barrier(axis, mesh)
