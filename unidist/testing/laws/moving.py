"""Tests redistribute over pairs of layouts, unidist.array's collectives, and what the ledger sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unidist import array, events
from unidist.algebra import Layout, Mesh, Redistribution, Sharding, redistribution, ring_bytes
from unidist.algebra.layout import REDUCE_OPS, ReduceOp
from unidist.backends.protocol import Array
from unidist.backends.sim import reference
from unidist.errors import CapabilityError
from unidist.ledger import ledger
from unidist.testing import samples
from unidist.testing.laws.world import World, cases, holds, law, raises, same


def _redistributes(world: World, shapes: Sequence[tuple[int, ...]], op: ReduceOp = "sum") -> None:
    for src, dst, rng in cases(world, shapes, op=op):
        value, shards = samples.legal_shards(src, rng, world.dtype)
        x = world.place(shards, src)
        out = world.backend.redistribute(x, src, dst)
        what = f"redistribute by {op} from {src.layout}"
        holds(world, out, dst, reference.run(redistribution(src, dst), shards), what)
        same(world.backend.gather(out, dst), value, f"{what} to {dst.layout} on {src.mesh}: gathered")
        holds(world, x, src, shards, "the input of redistribute")


@law
def check_redistribute_even(world: World) -> None:
    _redistributes(world, [(2 * world.size, world.size), (world.size,)])


@law
def check_redistribute_uneven(world: World) -> None:
    _redistributes(world, [(2 * world.size + 1, 5), (world.size - 1,)])


@law
def check_redistribute_empty(world: World) -> None:
    _redistributes(world, [(0, 3), (1, 1), (0,)])


@law
def check_redistribute_scalar(world: World) -> None:
    _redistributes(world, [()])


@law
def check_redistribute_many_dims(world: World) -> None:
    _redistributes(world, [(2, world.size, 3, 2)])


@law
def check_reductions(world: World) -> None:
    for op in REDUCE_OPS:
        if op in world.backend.capabilities.reduce_ops:
            _redistributes(world, [(5, world.size)], op)
        else:
            layout = Layout(partial={"x": op})
            raises(
                CapabilityError,
                f"{op} reduce",
                lambda layout=layout: array.distribute(np.ones(3, "float32"), Mesh({"x": world.size}), layout),  # type: ignore[misc]
            )


def _partial(world: World, mesh: Mesh, layout: Layout, shape: tuple[int, ...], seed: int) -> tuple[Any, Array]:
    sharding = Sharding(mesh, layout, shape)
    value, shards = samples.legal_shards(sharding, np.random.default_rng(seed), world.dtype)
    native = [world.array(shards[rank], world.dtype) for rank in world.backend.local_ranks()]
    return array.from_local(native, mesh, layout, shape=shape), value


def _arrives(world: World, x: Any, layout: Layout, value: Array, what: str) -> None:
    assert x.layout == layout, f"{what}: gave {x.layout}, expected {layout}"
    for rank, shard in x.shards().items():
        same(world.numpy(shard), value[samples.nested_chunks(x.sharding, rank)], f"{what} on {x.mesh}: rank {rank}")


@law
def check_collectives(world: World) -> None:
    for mesh in samples.meshes(world.size):
        shape, last = (2 * world.size + 1, 5), mesh.axis_names[-1]
        for axes in dict.fromkeys((mesh.axis_names, (last,), tuple(reversed(mesh.axis_names)))):
            x, value = _partial(world, mesh, Layout(partial=axes), shape, 3)
            _arrives(world, array.all_reduce(x, axes), Layout(), value, "all_reduce")
            _arrives(world, array.all_reduce(x), Layout(), value, "all_reduce of all axes")
            _arrives(world, array.reduce_scatter(x, axes, 1), Layout(None, axes), value, "reduce_scatter")
            _arrives(world, array.reduce_scatter(x, axes, -2), Layout(axes), value, "reduce_scatter, negative dim")
            x, value = _partial(world, mesh, Layout(axes), shape, 4)
            _arrives(world, array.all_gather(x, axes), Layout(), value, "all_gather")
            _arrives(world, array.all_to_all(x, axes, -1), Layout(None, axes), value, "all_to_all")
            _arrives(world, array.all_to_all(x, axes[-1:], 1), Layout(axes[:-1], axes[-1:]), value, "all_to_all, one")


@law
def check_broadcast(world: World) -> None:
    rng = np.random.default_rng(5)
    for mesh in samples.meshes(world.size):
        for axes in dict.fromkeys((mesh.axis_names, mesh.axis_names[:1])):
            other = [axis for axis in mesh.axis_names if axis not in axes]
            sharding = Sharding(mesh, Layout(*other[:1]), (5, 3))
            whole = {k: samples.draw(sharding.shape, world.dtype, rng) for k in range(mesh.axis_size(axes))}
            mine = {r: whole[mesh.group(axes, r).index][sharding.slices(r)] for r in mesh.devices}
            for root in dict.fromkeys((0, mesh.axis_size(axes) - 1)):
                wanted = {r: whole[root][sharding.slices(r)] for r in mesh.devices}
                x = world.place(mine, sharding)
                holds(world, world.backend.broadcast(x, sharding, axes, root), sharding, wanted, f"broadcast {root}")
                holds(world, x, sharding, mine, "the input of broadcast")


@law
def check_permute(world: World) -> None:
    for mesh, sharding, axes, pairs in permutations(world):
        _, shards = samples.legal_shards(sharding, np.random.default_rng(6), world.dtype)
        wanted = {rank: np.zeros_like(shards[rank]) for rank in mesh.devices}
        for rank in mesh.devices:
            group = mesh.group(axes, rank)
            for source, destination in pairs:
                if group.index == destination:
                    wanted[rank] = shards[group.ranks[source]]
        x = world.place(shards, sharding)
        holds(world, world.backend.permute(x, sharding, axes, pairs), sharding, wanted, f"permute {pairs}")
        holds(world, x, sharding, shards, "the input of permute")


@law
def check_signs_of_zero(world: World) -> None:
    """Checks that what only moves keeps its bits: -0 is not 0."""
    n = world.size
    mesh = Mesh({"x": n})
    whole, rows = (Sharding(mesh, layout, (n, n)) for layout in (Layout(), Layout("x")))
    ring = tuple((k, (k + 1) % n) for k in range(n))
    halves = sorted({"bfloat16", "float16"} & world.backend.capabilities.dtypes)
    for dtype in (world.dtype, *halves[:1]):
        zeros = {s: {r: np.full(s.local_shape(r), -0.0, "float32") for r in mesh.devices} for s in (whole, rows)}
        x, y = (world.place(zeros[s], s, dtype) for s in (rows, whole))
        columns = rows.with_layout(Layout(None, "x"))
        for what, out, sharding in (
            ("all_gather", world.backend.redistribute(x, rows, whole), whole),
            ("all_to_all", world.backend.redistribute(x, rows, columns), columns),
            ("permute", world.backend.permute(x, rows, ("x",), ring), rows),
            ("broadcast", world.backend.broadcast(y, whole, ("x",), n - 1), whole),
        ):
            kept = [bool(np.signbit(shard).all()) for shard in world.held(out, sharding).values()]
            assert all(kept), f"{what} of {dtype} made 0 of -0"


def permutations(world: World) -> Iterator[tuple[Mesh, Sharding, tuple[str, ...], tuple[tuple[int, int], ...]]]:
    turn = 0
    for mesh in samples.meshes(world.size):
        for axes in dict.fromkeys((mesh.axis_names, mesh.axis_names[:1])):
            size = mesh.axis_size(axes)
            sharding = Sharding(mesh, Layout(mesh.axis_names), (2 * world.size, 3))
            ring = tuple((k, (k + 1) % size) for k in range(size))
            kinds = ring, ring[:-1], ((0, size - 1),), ((0, 0),), ()
            count = min(world.layouts or len(kinds), len(kinds))
            for k in range(turn, turn + count):
                yield mesh, sharding, axes, kinds[k % len(kinds)]
            turn += count
        if len(mesh.axes) > 1:
            minor_first = tuple(reversed(mesh.axis_names))
            yield mesh, Sharding(mesh, Layout(mesh.axis_names), (2 * world.size, 3)), minor_first, ring[:-1]


@law
def check_ledger(world: World) -> None:
    """Checks that what is observed is as planned: op, axes, ranks and bytes of the process's lowest rank."""
    seen: list[events.Event] = []
    rank = world.backend.local_ranks()[0]
    for src, dst, rng in cases(world, [(2 * world.size, world.size), (5, 3)]):
        _, shards = samples.legal_shards(src, rng, world.dtype)
        x, moves = world.place(shards, src), redistribution(src, dst)
        seen.clear()
        with events.listen(seen.append), events.for_purpose("a test"):
            world.backend.redistribute(x, src, dst)
        _predicted(seen, moves, rank)
        whole = redistribution(src, src.with_layout(Layout()))
        seen.clear()
        with events.listen(seen.append), events.for_purpose("a test"):
            world.backend.gather(x, src)
        _predicted(seen, whole, rank)


def _predicted(seen: list[events.Event], moves: Redistribution, rank: int) -> None:
    found = [(e.op, e.axes, e.ranks, e.bytes, e.purpose) for e in seen]
    wanted = [
        (s.op, s.axes, s.before.mesh.group(s.axes, rank).ranks, s.bytes(4, rank), "a test") for s in moves.collectives
    ]
    assert found == wanted, f"{moves.src.layout} -> {moves.dst.layout} on {moves.src.mesh}: {found} != {wanted}"


@law
def check_ledger_of_broadcast_and_permute(world: World) -> None:
    mesh = Mesh({"x": world.size})
    for layout in (Layout(), Layout("x")):
        x = array.distribute(np.ones((2 * world.size, 3), world.dtype), mesh, layout)
        name = "permute" if layout.dims else "broadcast"
        with ledger() as book:
            if layout.dims:
                array.permute(x, "x", [(0, 1)])
            else:
                array.broadcast(x, "x", 0)
        held = 4 * x.sharding.elements(world.backend.local_ranks()[0])
        assert (book.count(), book.count(name)) == (1, 1)
        assert book.bytes() == ring_bytes(name, world.size, held)
        assert book.events[0].ranks == tuple(range(world.size))
