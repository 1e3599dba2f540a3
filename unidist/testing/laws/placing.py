"""Devices, native meshes and layouts; distribute, from_local, to_local, gather."""

from __future__ import annotations

import numpy as np

from unidist import array
from unidist.algebra import Layout, Mesh, Sharding
from unidist.algebra.layout import REDUCE_OPS
from unidist.backends import registry
from unidist.backends.protocol import ALL_DTYPES, DistributionBackend
from unidist.backends.sim import reference
from unidist.testing import samples
from unidist.testing.laws.world import World, holds, law, layouts, same, shapes


@law
def check_protocol(world: World) -> None:
    backend, capabilities = world.backend, world.backend.capabilities
    assert isinstance(backend, DistributionBackend), "a member of DistributionBackend is missing"
    assert registry.current() is backend, "the World's backend must be the one in use"
    assert capabilities.view in ("local", "global")
    assert capabilities.uneven in ("native", "padded")
    assert set() < capabilities.dtypes <= ALL_DTYPES
    assert world.dtype in capabilities.dtypes, "float32 is the least that an adapter moves"
    assert {"sum"} <= capabilities.reduce_ops <= set(REDUCE_OPS)
    assert capabilities.differentiable == (world.vjp is not None), (
        f"capabilities.differentiable is {capabilities.differentiable}: give World(vjp=...) if it is, and only then"
    )


@law
def check_devices(world: World) -> None:
    backend = world.backend
    names = backend.list_devices()
    assert len(names) == len(set(names)) > 1, f"a conformance world has several devices, found {names}"
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    for kind in kinds:
        assert backend.list_devices(kind) == [name for name in names if name.partition(":")[0] == kind]
    assert backend.list_devices("abacus") == []
    ranks = backend.local_ranks()
    assert list(ranks) == sorted(set(ranks))
    assert set(ranks) <= set(range(len(names)))
    assert 0 <= backend.process_index() < backend.process_count()
    if backend.process_count() == 1:
        assert ranks == tuple(range(len(names)))
    assert Mesh({"x": -1}).size == len(names), "a mesh of -1 is filled by the world's devices"
    assert Mesh({"x": len(names)}, names) == Mesh({"x": len(names)}), "devices are known by their names"


@law
def check_meshes(world: World) -> None:
    backend, n = world.backend, world.size
    mesh = Mesh({"data": n, "model": 1})
    others = [
        Mesh({"data": n, "model": 1}, list(reversed(range(n)))),
        Mesh({"rows": n, "model": 1}),
        Mesh({"model": 1, "data": n}),
        Mesh({"data": n}),
    ]
    assert backend.mesh(mesh) == backend.mesh(Mesh({"data": n, "model": 1})), "equal meshes, different objects"
    for other in others:
        assert backend.mesh(mesh) != backend.mesh(other), f"{mesh} and {other} must be different native meshes"
    sharding = Sharding(mesh, Layout("data"), (2 * n, 3))
    assert backend.layout(sharding) == backend.layout(Sharding(mesh, Layout("data"), (2 * n, 3)))
    for layout in (Layout(), Layout(None, "data")):
        assert backend.layout(sharding) != backend.layout(sharding.with_layout(layout)), f"{layout} is another layout"
    for other in others[:2]:
        moved = Sharding(other, Layout(other.axis_names[0]), (2 * n, 3))
        assert backend.layout(sharding) != backend.layout(moved), f"a layout on {other} is another layout"


@law
def check_distribute(world: World) -> None:
    rng = np.random.default_rng(1)
    for sharding in layouts(world, shapes(world)):
        value = samples.draw(sharding.shape, world.dtype, rng)
        given = value.copy()
        x = world.backend.distribute(given, sharding)
        given[...] = 99
        holds(world, x, sharding, reference.distribute(value, sharding), "distribute")
        same(world.backend.gather(x, sharding), value, f"distribute, gather: {sharding}")


@law
def check_from_local(world: World) -> None:
    rng = np.random.default_rng(2)
    for sharding in layouts(world, shapes(world)):
        value, shards = samples.legal_shards(sharding, rng, world.dtype)
        x = world.place(shards, sharding)
        holds(world, x, sharding, shards, "from_local")
        same(world.backend.gather(x, sharding), value, f"from_local, gather: {sharding}")


@law
def check_arrays(world: World) -> None:
    n = world.size
    mesh, value = Mesh({"x": n}), np.arange(2 * n * 3, dtype=world.dtype).reshape(2 * n, 3)
    x = array.distribute(value, mesh, Layout("x"))
    assert (x.shape, x.ndim, x.dtype, x.mesh, x.layout) == ((2 * n, 3), 2, world.dtype, mesh, Layout("x"))
    assert sorted(x.shards()) == list(world.backend.local_ranks())
    for rank, shard in x.shards().items():
        same(world.numpy(shard), value[2 * rank : 2 * rank + 2], f"shard {rank}")
    again = array.from_local(list(x.shards().values()), mesh, Layout("x"))
    assert again.shape == (2 * n, 3)
    same(again.numpy(), value, "from_local without shape")
    same(x.redistribute((None, "x")).numpy(), value, "redistribute by a tuple")
    for odd in (value[::-1, ::-1], value.astype(value.dtype.newbyteorder(">"))):
        same(array.distribute(odd, mesh, Layout("x")).numpy(), odd, f"distribute of strides {odd.strides}, {odd.dtype}")
        shards = [odd[2 * rank : 2 * rank + 2] for rank in world.backend.local_ranks()]
        same(array.from_local(shards, mesh, Layout("x")).numpy(), odd, f"from_local of {odd.dtype}")
