"""DistributedArray and its collectives on the simulator: layouts that come out, Keras's objects, errors by text."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unidist
from unidist import Layout, Mesh
from unidist.array import collectives
from unidist.backends import registry
from unidist.errors import CapabilityError, LayoutError, MeshError

MESH = Mesh({"data": 2, "model": 3})
VALUE = np.arange(24.0).reshape(4, 6)


@pytest.fixture(autouse=True)
def six_devices() -> Iterator[None]:
    with registry.isolated():
        registry.use("sim", devices=6)
        yield


def placed(*dims: Any, **kind: Any) -> unidist.DistributedArray:
    return unidist.distribute(VALUE, MESH, Layout(*dims, **kind))


def test_an_array_tells_what_it_is() -> None:
    x = placed("data", "model")
    assert repr(x) == (
        "DistributedArray(shape=(4, 6), dtype=float64, layout=Layout('data', 'model'), "
        "mesh=Mesh({'data': 2, 'model': 3}))"
    )
    np.testing.assert_array_equal(x.shards()[4], VALUE[2:4, 2:4])
    np.testing.assert_array_equal(x.numpy(), VALUE)


def test_each_collective_changes_the_layout_as_it_says() -> None:
    contributions = [np.full((4, 6), 10.0**rank) for rank in range(6)]
    partial = unidist.from_local(contributions, MESH, Layout(partial=("data", "model")))
    np.testing.assert_array_equal(partial.numpy(), np.full((4, 6), 111111.0))
    reduced = unidist.all_reduce(partial, "data")
    assert reduced.layout == Layout(partial="model")
    np.testing.assert_array_equal(reduced.shards()[1], np.full((4, 6), 10010.0))
    scattered = unidist.reduce_scatter(partial, ("data", "model"), -1)
    assert scattered.layout == Layout(None, ("data", "model"))
    np.testing.assert_array_equal(scattered.shards()[5], np.full((4, 1), 111111.0))
    x = placed("data", "model")
    assert unidist.all_gather(x, "model").layout == Layout("data")
    assert unidist.all_to_all(x, "model", 0).layout == Layout(("data", "model"))
    assert unidist.all_reduce(x) is x


def test_broadcast_takes_the_roots_replica_and_permute_moves_shards() -> None:
    differing = unidist.from_local([np.full(2, rank) for rank in range(6)], MESH, Layout())
    np.testing.assert_array_equal(differing.numpy(), [0, 0])
    assert [int(s[0]) for s in unidist.broadcast(differing, "model", 2).shards().values()] == [2, 2, 2, 5, 5, 5]
    assert [int(s[0]) for s in unidist.broadcast(differing, None, 4).shards().values()] == [4] * 6
    moved = unidist.permute(differing, "model", [(0, 1), (1, 2)])
    assert [int(s[0]) for s in moved.shards().values()] == [0, 0, 1, 0, 3, 4]


def test_the_input_is_left_alone_and_nothing_is_shared_with_it() -> None:
    value = VALUE.copy()
    x = unidist.distribute(value, MESH, Layout("data"))
    y = x.redistribute(Layout())
    value[...] = -1
    y.shards()[0][...] = -2
    np.testing.assert_array_equal(x.numpy(), VALUE)
    assert x.layout == Layout("data")


def test_a_barrier_knows_the_mesh_of_the_strategy_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[Any] = []
    monkeypatch.setattr(registry.current(), "barrier", lambda *where: came.append(where))
    monkeypatch.setattr(collectives, "_mesh_in_use", lambda: MESH)
    unidist.barrier("data")
    unidist.barrier()
    assert came == [(MESH, ("data",)), ()]
    with pytest.raises(MeshError, match="unknown axis 'pipe'"):
        unidist.barrier("pipe")


def test_what_is_written_to_a_shard_changes_nothing() -> None:
    x = unidist.distribute(VALUE, MESH, Layout("data"))
    for shard in x.shards().values():
        shard[...] = -1
    np.testing.assert_array_equal(x.numpy(), VALUE)
    np.testing.assert_array_equal(x.shards()[0], VALUE[:2])


def test_lists_scalars_and_empty_values() -> None:
    np.testing.assert_array_equal(unidist.distribute([[1, 2], [3, 4]], MESH, ("data",)).shards()[3], [[3, 4]])
    assert unidist.distribute(3.5, MESH, Layout(partial="data")).numpy() == 3.5
    empty = unidist.distribute(np.zeros((0, 5)), MESH, Layout("model", "data"))
    assert [shard.shape for shard in empty.shards().values()] == [(0, 3)] * 3 + [(0, 2)] * 3


def test_kerass_mesh_and_layout_are_taken() -> None:
    device_mesh = SimpleNamespace(
        shape=(2, 3), axis_names=["data", "model"], devices=np.array([[f"cpu:{5 - k}" for k in range(6)]])
    )
    x = unidist.distribute(VALUE, device_mesh, SimpleNamespace(axes=("data", None)))
    assert x.mesh == Mesh({"data": 2, "model": 3}, [5, 4, 3, 2, 1, 0])
    assert x.layout == Layout("data")
    assert unidist.distribute(VALUE, MESH).layout == Layout()


def test_from_local_infers_even_shapes_and_takes_uneven_ones_by_name() -> None:
    assert unidist.from_local([np.zeros((2, 2))] * 6, MESH, Layout("data", "model")).shape == (4, 6)
    assert unidist.from_local([np.zeros((1, 2))] * 6, MESH, Layout(("data", "model"))).shape == (6, 2)
    shards = [VALUE[:3, :2], VALUE[:3, 2:4], VALUE[:3, 4:5], VALUE[3:, :2], VALUE[3:, 2:4], VALUE[3:, 4:5]]
    with pytest.raises(LayoutError, match="give shape="):
        unidist.from_local(shards, MESH, Layout("data", "model"))
    with pytest.raises(LayoutError, match=r"rank 0 gave a shard of shape \(3, 2\).*has shape \(2, 2\) there"):
        unidist.from_local(shards, MESH, Layout("data", "model"), shape=(4, 5))
    shards = [s[:2] if k < 3 else VALUE[2:4, s0] for k, (s, s0) in enumerate(zip(shards, cuts() * 2, strict=True))]
    x = unidist.from_local(shards, MESH, Layout("data", "model"), shape=(4, 5))
    np.testing.assert_array_equal(x.numpy(), VALUE[:, :5])


def cuts() -> list[slice]:
    return [slice(0, 2), slice(2, 4), slice(4, 5)]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: placed("pipe"), LayoutError, r"names axis 'pipe', but the mesh has \{'data': 2, 'model': 3\}"),
        (lambda: placed("data", "data"), LayoutError, "axis 'data' is used twice"),
        (lambda: placed(None, None, "data"), LayoutError, "shards dim 2 of a tensor that has 2 dims"),
        (lambda: placed("data").redistribute(Layout("pipe")), LayoutError, "names axis 'pipe'"),
        (lambda: placed().redistribute("data"), LayoutError, "expected a Layout, a tuple of axes"),
        (lambda: unidist.distribute(VALUE, {"data": 2}, None), MeshError, "expected a Mesh or a keras"),
        (lambda: unidist.all_reduce(placed("data"), "data"), LayoutError, "must be partial there, but it is Layout"),
        (lambda: unidist.all_reduce(placed(), "pipe"), MeshError, "unknown axis 'pipe'"),
        (lambda: unidist.reduce_scatter(placed(partial="data"), "data", 2), LayoutError, r"dim 2 is out of range"),
        (lambda: unidist.reduce_scatter(placed(partial="data"), "data", -3), LayoutError, r"dim -3 is out of range"),
        (lambda: unidist.all_gather(placed("data"), "model"), LayoutError, "all_gather over 'model'.*sharded there"),
        (
            lambda: unidist.all_gather(placed(("data", "model")), ("model", "data")),
            LayoutError,
            r"cut by \('data', 'model'\), name them in that order",
        ),
        (lambda: unidist.all_to_all(placed("data"), "data", 5), LayoutError, "dim 5 is out of range"),
        (lambda: unidist.broadcast(placed("data"), "data", 0), LayoutError, "gather or reduce it first"),
        (lambda: unidist.broadcast(placed(), "model", 3), LayoutError, r"root 3 is not a place of 0\.\.2"),
        (lambda: unidist.permute(placed(), "model", [(0, 3)]), LayoutError, r"each destination .* 0\.\.2, once; found"),
        (lambda: unidist.permute(placed(), "model", [(-1, 0)]), LayoutError, "each source must be a place"),
        (lambda: unidist.permute(placed(), "model", [(0, 1), (2, 1)]), LayoutError, "each destination must be"),
        (lambda: unidist.from_local([VALUE], MESH, Layout()), LayoutError, "give 6 shards, found 1"),
        (lambda: unidist.from_local([], MESH, Layout()), LayoutError, "do not tell the global shape"),
        (
            lambda: unidist.from_local([np.arange(3)] * 6, MESH, Layout(partial={"model": "mean"})),
            LayoutError,
            "a mean of int64 values",
        ),
        (lambda: unidist.barrier("data"), LayoutError, r"give the mesh that has it, as barrier\('data', mesh=mesh\)"),
        (lambda: unidist.barrier(MESH), LayoutError, r"found a mesh: write barrier\(mesh=mesh\)"),
        (lambda: unidist.broadcast(placed(), "model", 0.5), LayoutError, r"root 0\.5 is not a place of 0\.\.2"),
        (lambda: unidist.broadcast(placed(), "model", True), LayoutError, "root True is not a place"),
        (lambda: unidist.permute(placed(), "model", [(0, 0.5)]), LayoutError, r"pairs of places.* found \[\(0, 0\.5"),
        (lambda: unidist.permute(placed(), "model", [0, 1]), LayoutError, r"pairs of places.* found \[0, 1\]"),
        (lambda: unidist.all_gather(placed("data"), 0), MeshError, "named by a string, found 0"),
        (lambda: unidist.all_reduce(placed(), {"data": 2}), LayoutError, "must be partial there"),
        (lambda: unidist.all_gather(VALUE, "data"), LayoutError, "takes a DistributedArray, found ndarray"),
        (lambda: unidist.permute(VALUE, "data", []), LayoutError, "takes a DistributedArray, found ndarray"),
        (lambda: unidist.broadcast(VALUE, "data", 0), LayoutError, "takes a DistributedArray, found ndarray"),
        (lambda: unidist.all_reduce(VALUE), LayoutError, "takes a DistributedArray, found ndarray"),
        (lambda: unidist.all_to_all(placed("data"), "data", 0.5), LayoutError, r"dim must be .* found 0\.5"),
        (lambda: unidist.barrier("pipe", MESH), MeshError, "unknown axis 'pipe'"),
        (lambda: unidist.distribute(VALUE, Mesh({"x": 8}), None), MeshError, "needs 8 devices, and sim has 6"),
        (lambda: unidist.distribute(np.array(["a"]), MESH, None), CapabilityError, "cannot move str.* cast to one of"),
        (
            lambda: unidist.distribute(np.arange(3), MESH, Layout(partial={"data": "mean"})),
            LayoutError,
            "a mean of int64 values is no int64: cast first",
        ),
        (
            lambda: unidist.distribute(np.ones(3, bool), MESH, None).redistribute(Layout(partial={"data": "mean"})),
            LayoutError,
            "a mean of bool values",
        ),
    ],
)
def test_errors_say_what_was_found_and_what_to_do(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("axes", ["model", ("data", "model")], ids=["every group", "the last group"])
def test_uneven_shards_cannot_be_permuted(axes: Any) -> None:
    x = unidist.distribute(np.zeros(5), MESH, Layout(axes))
    with pytest.raises(LayoutError, match="differ in size"):
        unidist.permute(x, "model", [(0, 1)])


def test_a_reduction_that_the_backend_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    backend = registry.current()
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, reduce_ops=frozenset({"sum"})))
    with pytest.raises(
        CapabilityError, match=r"backend 'sim' cannot reduce by 'max' \(axis 'data'\): it has \['sum'\]"
    ):
        placed(partial={"data": "max"})


def test_means_and_reductions_have_the_values_of_numpy() -> None:
    contributions = [VALUE * (rank + 1) for rank in range(6)]
    stack = np.stack(contributions)
    for op, fold in {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}.items():
        layout = Layout(partial={"data": op, "model": op})
        x = unidist.from_local(contributions, MESH, layout)
        np.testing.assert_allclose(unidist.all_reduce(x).shards()[3], fold(stack, axis=0), rtol=1e-12)
        np.testing.assert_allclose(placed(partial={"data": op}).numpy(), VALUE, rtol=1e-12)
