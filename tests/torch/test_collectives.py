"""The torch backend's collectives in real processes: places, dtypes, handles, bytes, worlds and lost peers."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

import unidist
from tests import preloaded
from tests.launch.runs import wait_until
from tests.support import flights
from unidist import events
from unidist.algebra import Group, Layout, Mesh, Sharding
from unidist.backends.desync import line_of
from unidist.backends.protocol import ALL_DTYPES, Cluster
from unidist.backends.torch.backend import TorchBackend
from unidist.backends.torch.buffers import BufferedCollectives
from unidist.backends.torch.comm import TorchComm
from unidist.backends.torch.exchange import SMALL, DirectCollectives
from unidist.backends.torch.primitives import Eager
from unidist.errors import BackendMismatchError, CapabilityError, LayoutError, MeshError, ProcessLostError
from unidist.flight.reading import read_all
from unidist.flight.recorder import recorder
from unidist.testing.processes import ProcessFailedError, ProcessWorld, free_port

Way = Literal["direct", "buffered"]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    with ProcessWorld(request.param, setup=strictly_join, preload=preloaded.TORCH) as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[ProcessWorld]:
    with ProcessWorld(4, setup=strictly_join, preload=preloaded.TORCH) as processes:
        yield processes


def join() -> None:
    unidist.use("torch")


def strictly_join() -> None:
    for kind in (FutureWarning, UserWarning):
        warnings.simplefilter("error", kind)
    join()


def backend() -> TorchBackend:
    return unidist.backend()  # type: ignore[return-value]


def everyone(reverse: bool = False) -> Group:
    ranks = list(range(backend().process_count()))
    return Mesh({"x": -1}, ranks[::-1] if reverse else ranks).group("x", backend().rank)


def comm(way: Way) -> TorchComm:
    """Our way over gloo, and the way that CUDA tensors go over NCCL, here over gloo."""
    return TorchComm(backend().comm.transport, DirectCollectives() if way == "direct" else BufferedCollectives(Eager()))


def part(place: int, shape: tuple[int, ...], dtype: str = "float32", op: str = "sum") -> torch.Tensor:
    """What a place brings: small whole numbers, whose reductions are exact in every dtype."""
    draw = np.random.default_rng([place, *shape])
    low, high = (0, 2) if dtype == "bool" else (1, 3) if op == "prod" else (0, 5)
    return torch.tensor(draw.integers(low, high, shape)).to(getattr(torch, dtype))


# Collectives over one group, against what one process computes --------------------------------------------------------


def check_collectives(way: Way, reverse: bool, sizes: tuple[int, ...], dtype: str) -> None:
    group, c = everyone(reverse), comm(way)
    n, k = group.size, group.index
    assert group.ranks == tuple(range(n))[:: -1 if reverse else 1]
    sizes = tuple(sizes[i % len(sizes)] for i in range(n))
    ops = ("sum", "max", "min", "prod", *(("mean",) if dtype in FLOATS else ()))
    for dim, shape in ((0, (-1, 3)), (1, (2, -1)), (1, (2, -1, 2)), (0, (-1,)), (1, (1, -1))):
        ragged = [tuple(size if s == -1 else s for s in shape) for size in sizes]
        full = tuple(sum(sizes) if s == -1 else s for s in shape)
        pieces = [part(j, ragged[j], dtype) for j in range(n)]
        same(c.all_gather(_strided(pieces[k]), group, dim, sizes), torch.cat(pieces, dim))
        wholes = [part(j, full, dtype) for j in range(n)]
        root = n - 1
        same(c.broadcast(_strided(wholes[k]), group, root), wholes[root])
        pairs = tuple((j, (j + 1) % n) for j in range(n - 1))
        same(c.permute(_strided(wholes[k]), group, pairs), wholes[k - 1] if k else torch.zeros_like(wholes[k]))
        for op in ops:
            wholes = [part(j, full, dtype, op) for j in range(n)]
            reduced = reduce(wholes, op)
            same(c.all_reduce(_strided(wholes[k]), group, op), reduced)
            same(c.reduce_scatter(_strided(wholes[k]), group, dim, sizes, op), reduced.split(sizes, dim)[k])
    split_sizes = sizes[::-1]
    pieces = [part(j, (sum(split_sizes), sizes[j]), dtype) for j in range(n)]
    wanted = torch.cat(pieces, 1).split(split_sizes)[k]
    same(c.all_to_all(_strided(pieces[k]), group, 0, split_sizes, 1, sizes), wanted)
    c.barrier(group)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous in memory."""
    wide = x.new_zeros((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


def reduce(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    stack = torch.stack(parts)
    if stack.dtype == torch.bool:
        return stack.any(0) if op in ("sum", "max") else stack.all(0)
    if op == "mean":
        return (stack.double().sum(0) / len(parts)).to(stack.dtype)
    return {"sum": stack.sum(0), "prod": stack.prod(0), "max": stack.amax(0), "min": stack.amin(0)}[op].to(stack.dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.is_contiguous()
    np.testing.assert_array_equal(_plain(found), _plain(wanted))


def _plain(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


@pytest.mark.parametrize("way", ["direct", "buffered"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", [(2,), (3, 1), (2, 0), (0, 0)])
def test_collectives(world: ProcessWorld, way: Way, reverse: bool, sizes: tuple[int, ...]) -> None:
    world.call(check_collectives, way, reverse, sizes, "float32")


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES))
@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_dtypes(world: ProcessWorld, way: Way, dtype: str) -> None:
    world.call(check_collectives, way, False, (3, 1), dtype)


def check_large() -> None:
    """Beyond SMALL an all_reduce is gloo's, with its detours."""
    group = everyone()
    for dtype, op in (("int16", "sum"), ("bool", "sum"), ("bool", "prod"), ("bfloat16", "max"), ("float32", "mean")):
        wholes = [part(j, (SMALL + 1, 2), dtype) for j in range(group.size)]
        same(backend().comm.all_reduce(wholes[group.index].t(), group, op), reduce(wholes, op).t().contiguous())


def test_large_reductions(world: ProcessWorld) -> None:
    world.call(check_large)


def check_order() -> tuple[bytes, bytes]:
    """Sums that depend on their order are summed in the order of the places, for all ranks alike."""
    group = everyone(reverse=True)
    values = [
        torch.tensor([1e8, 1.0, -1e8, 1.0][j % 4] * (1 + j // 4)).expand(group.size, 8).clone()
        for j in range(group.size)
    ]
    total = values[0].clone()
    for value in values[1:]:
        total += value
    mine = values[group.index]
    same(backend().comm.all_reduce(mine, group, "sum"), total)
    same(backend().comm.reduce_scatter(mine, group, 0, (1,) * group.size, "sum"), total[:1])
    large = torch.randn(SMALL, generator=torch.Generator().manual_seed(group.index))
    return total.numpy().tobytes(), backend().comm.all_reduce(large, group, "sum").numpy().tobytes()


def test_sums_are_in_rank_order_and_alike(world: ProcessWorld) -> None:
    assert len(set(world.call(check_order))) == 1


# Handles --------------------------------------------------------------------------------------------------------------


def check_handles(way: Way, dtype: str) -> None:
    group, c = everyone(reverse=True), comm(way)
    n, k = group.size, group.index
    for op in ("sum", "max", *(("mean",) if dtype in FLOATS else ())):
        buffers = [[part(j + 10 * b, (n * 3, 2), dtype) for j in range(n)] for b in range(3)]
        if op == "max" and dtype in FLOATS:
            for j, x in enumerate(itertools.chain(*buffers)):
                x[j % (n * 3), 0] = torch.nan
        # Three of each under way at a time, awaited last first.
        inplace = [buffer[k].clone() for buffer in buffers]
        handles = [c.all_reduce_inplace(x, group, op) for x in inplace]
        outs = [torch.empty_like(x[:3]) for x in inplace]
        handles += [c.reduce_scatter_into(out, b[k], group, op) for out, b in zip(outs, buffers, strict=True)]
        wholes = [torch.empty_like(x) for x in inplace]
        parts = [whole[3 * k : 3 * k + 3].copy_(b[k][:3]) for whole, b in zip(wholes, buffers, strict=True)]
        handles += [c.all_gather_into(whole, p, group) for whole, p in zip(wholes, parts, strict=True)]
        for handle in reversed(handles):
            handle.wait()
            handle.wait()
        for b in range(3):
            reduced = reduce(buffers[b], op)
            same(inplace[b], reduced)
            same(outs[b], reduced[3 * k : 3 * k + 3])
            same(wholes[b], torch.cat([x[:3] for x in buffers[b]]))


@pytest.mark.parametrize("way", ["direct", "buffered"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "bool"])
def test_handles(world: ProcessWorld, way: Way, dtype: str) -> None:
    world.call(check_handles, way, dtype)


def check_entries(way: Way) -> None:
    """What is waited for is in the record: once, as what it is, and as ended."""
    group, c = everyone(), TorchComm(backend()._transports, comm(way)._direct, backend()._watch)
    ranks = "ranks 0, 1" if group.size == 2 else f"ranks 0-{group.size - 1}"

    def call() -> None:
        with events.for_purpose(f"entries, {way}"):
            for _ in range(3):
                c.all_reduce(torch.ones(2, 3), group, "sum")
            c.all_gather(torch.ones(1 + group.index, 2), group, 0, tuple(range(1, group.size + 1)))
            c.barrier(group)

    name = f" of {ranks} for 'entries, {way}'"
    assert flights.said(flights.since(call)) == [
        *((f"all_reduce of float32 (2, 3){name}", k, "ended") for k in (1, 2, 3)),
        (f"all_gather of float32 (?, 2){name}", 1, "ended"),
        (f"barrier{name}", 1, "ended"),
    ]


def check_entries_under_way(way: Way) -> None:
    """A handle's entry goes on until it is waited for, or let go."""
    group, c = everyone(), TorchComm(backend()._transports, comm(way)._direct, backend()._watch)
    handles: list[Any] = []

    def stand(call: Any) -> list[str]:
        return [flights.how(entry) for entry in flights.since(call)]

    parts = torch.ones(group.size, 2)
    assert stand(lambda: handles.append(c.all_reduce_inplace(torch.ones(2), group, "sum"))) == ["under way"]
    assert stand(lambda: handles.append(c.reduce_scatter_into(torch.ones(1, 2), parts, group, "sum"))) == ["under way"]
    assert stand(lambda: handles.append(c.all_gather_into(parts.clone(), torch.ones(1, 2), group))) == ["under way"]
    numbers = [entry.number for entry in flights.here().entries[-3:]]
    for handle in handles:
        handle.wait()
    ended = {entry.number: flights.how(entry) for entry in flights.here().entries}
    assert [ended[number] for number in numbers] == ["ended"] * 3
    dropped = c.all_reduce_inplace(torch.ones(2), group, "sum")
    finish = dropped._finish  # type: ignore[attr-defined]
    del dropped
    assert flights.how(flights.here().entries[-1]) == "failed"
    finish()


@pytest.mark.parametrize("way", ["direct", "buffered"])
@pytest.mark.parametrize("check", [check_entries, check_entries_under_way])
def test_what_is_waited_for_is_in_the_record(world: ProcessWorld, check: Any, way: Way) -> None:
    world.call(check, way)


def wait_in_the_record(folder: str) -> Any:
    """What rank 1, which comes late, reads of rank 0 meanwhile."""
    group = everyone()
    if backend().rank == 0:
        recorder.open(Path(folder), 0, group.size, line_of)
    found, limit = None, time.monotonic() + 30
    while backend().rank == 1 and (found is None or not found.site) and time.monotonic() < limit:
        flight = read_all(Path(folder)).get(0)
        found = flight.wait if flight is not None else None
        time.sleep(0.05)
    backend().comm.all_reduce(torch.ones(5), group, "sum")
    if backend().rank == 0:
        kept = read_all(Path(folder))[0].entries[-1]
        recorder.close()
        return flights.how(kept), flights.how(flights.here().entries[-1])
    return found


def test_another_process_reads_what_one_waits_in(four: ProcessWorld, tmp_path: Path) -> None:
    ended, found, *_ = four.call(wait_in_the_record, str(tmp_path))
    assert ended == ("ended", "ended")
    assert found.what == "all_reduce of float32 (5,) of ranks 0-3"
    assert found.site.startswith("test_collectives.py:")
    assert found.site.endswith(" in wait_in_the_record")


def check_wrong_buffers() -> None:
    group, x = everyone(), torch.zeros(4, 2 * backend().process_count())
    for call in (
        lambda: backend().comm.all_reduce_inplace(x.t(), group, "sum"),
        lambda: backend().comm.reduce_scatter_into(x, x, group, "sum"),
        lambda: backend().comm.all_gather_into(x, x.double(), group),
    ):
        with pytest.raises(LayoutError):
            call()
    empty = torch.zeros(0)
    for handle in (
        backend().comm.all_reduce_inplace(empty, group, "sum"),
        backend().comm.reduce_scatter_into(empty, empty, group, "sum"),
        backend().comm.all_gather_into(empty, empty, group),
    ):
        handle.wait()


def test_buffers_that_do_not_fit(world: ProcessWorld) -> None:
    world.call(check_wrong_buffers)


# Meshes ---------------------------------------------------------------------------------------------------------------


def check_partial_meshes() -> None:
    """Meshes of some ranks, met in different numbers by different ranks, need nobody else."""
    rank = backend().rank
    value = np.arange(10.0)
    for devices in ([3, 1], [0, 1], [2, 0, 3], [3, 1], [1, 2, 3]):
        mesh = Mesh({"x": len(devices)}, devices)
        if rank in devices:
            x = unidist.distribute(value, mesh, Layout("x"))
            place = devices.index(rank)
            np.testing.assert_array_equal(
                x.shards()[rank].numpy(), np.array_split(value, _bounds(10, len(devices)))[place]
            )
            np.testing.assert_array_equal(x.numpy(), value)
        else:
            with pytest.raises(MeshError, match=f"rank {rank} is not in"):
                unidist.distribute(value, mesh, Layout("x"))


def _bounds(size: int, parts: int) -> list[int]:
    step = -(-size // parts)
    return [min(step * k, size) for k in range(1, parts)]


def test_meshes_of_some_ranks(four: ProcessWorld) -> None:
    four.call(check_partial_meshes)


def check_native(order: list[int]) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = Mesh({"data": 2, "model": 2}, order)
    value = torch.arange(48.0).view(8, 6)
    for layout in (Layout("data", "model"), Layout(("data", "model")), Layout(None, "model"), Layout(partial="data")):
        sharding = Sharding(mesh, layout, (8, 6))
        native = backend().layout(sharding)
        x = backend().distribute(value, sharding)
        theirs = DTensor.from_local(x, native.device_mesh, native.placements, run_check=False)
        assert theirs.shape == (8, 6)
        np.testing.assert_array_equal(theirs.full_tensor().numpy(), value.numpy())
    flat = backend().layout(Sharding(Mesh({"x": 4}, order), Layout("x"), (8,)))
    whole = DTensor.from_local(torch.arange(8.0), flat.device_mesh, [Replicate()], run_check=False)
    cut = whole.redistribute(placements=[Shard(0)])
    np.testing.assert_array_equal(cut.to_local().numpy(), np.arange(8.0)[2 * order.index(backend().rank) :][:2])
    np.testing.assert_array_equal(cut.full_tensor().numpy(), np.arange(8.0))
    crossed = backend().layout(Sharding(mesh, Layout(("model", "data")), (8, 6)))
    with pytest.raises(CapabilityError, match="model"):
        crossed.placements  # noqa: B018


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_dtensor_on_our_meshes_is_right(four: ProcessWorld, order: list[int]) -> None:
    four.call(check_native, order)


# Gradients ------------------------------------------------------------------------------------------------------------


def check_gradients() -> None:
    """A loss over sharded arrays has the gradients, and their gradients, of one process."""
    mesh, rank = Mesh({"data": 2, "model": -1}), backend().rank
    draw = torch.Generator().manual_seed(3)
    whole_x, whole_w = torch.randn(7, 5, generator=draw), torch.randn(5, 3, generator=draw)
    x_at, w_at = Sharding(mesh, Layout("data", "model"), (7, 5)), Sharding(mesh, Layout("model", None), (5, 3))
    y_at = Sharding(mesh, Layout("data", partial="model"), (7, 3))

    def sharded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = backend().redistribute(w, w_at, w_at.with_layout(Layout("model", fanout="data")))
        y = backend().redistribute(torch.tanh(x) @ w, y_at, y_at.with_layout(Layout()))
        return (y**3).sum()

    x, w = (backend().distribute(v, s).clone().requires_grad_() for v, s in ((whole_x, x_at), (whole_w, w_at)))
    a, b = whole_x.clone().requires_grad_(), whole_w.clone().requires_grad_()
    loss, wanted = sharded(x, w), ((torch.tanh(a) @ b) ** 3).sum()
    torch.testing.assert_close(loss, wanted)
    first, wanted_first = (
        torch.autograd.grad(loss, [x, w], create_graph=True),
        torch.autograd.grad(wanted, [a, b], create_graph=True),
    )
    for found, full, at in zip(first, wanted_first, (x_at, w_at), strict=True):
        torch.testing.assert_close(found, full[at.slices(rank)])
    norm_at = Sharding(mesh, Layout(partial=("data", "model")), ())
    norm = backend().redistribute((first[0] ** 2).sum(), norm_at, norm_at.with_layout(Layout()))
    (second,) = torch.autograd.grad(norm, x)
    (wanted_second,) = torch.autograd.grad((wanted_first[0] ** 2).sum(), a)
    torch.testing.assert_close(second, wanted_second[x_at.slices(rank)], rtol=1e-4, atol=1e-5)  # sums of cubes of sums
    peak = Sharding(mesh, Layout(partial={"data": "max"}), (2,))
    top = backend().redistribute(torch.ones(2, requires_grad=True), peak, peak.with_layout(Layout()))
    with pytest.raises(LayoutError, match="max"):
        top.sum().backward()


def test_gradients_and_their_gradients(world: ProcessWorld) -> None:
    world.call(check_gradients)


# The ledger -----------------------------------------------------------------------------------------------------------


def bytes_of_a_gather(size: int) -> tuple[list[tuple[str, tuple[int, ...], float]], int]:
    x = unidist.distribute(np.ones((size, 3), "float32"), Mesh({"x": -1}), Layout("x"))
    with unidist.ledger() as book, events.for_purpose("test"):
        unidist.all_gather(x, "x")
    return [(e.op, e.ranks, float(e.bytes)) for e in book.events], x.data.shape[0]


def test_bytes_are_those_of_the_ring(world: ProcessWorld) -> None:
    n = world.count
    for rows, size in ((8, 8), (7, 7)):
        for rank, (found, held) in enumerate(world.call(bytes_of_a_gather, size)):
            assert found == [("all_gather", tuple(range(n)), (n - 1) / n * rows * 3 * 4)]
            assert held == len(np.array_split(range(size), _bounds(size, n))[rank])


def wrong_shape() -> str:
    at = Sharding(Mesh({"x": -1}), Layout("x"), (8,))
    try:
        backend().redistribute(torch.ones(3), at, at.with_layout(Layout()))
    except LayoutError as error:
        return str(error)
    return "no error"


def test_a_shard_of_the_wrong_shape_is_told_before_anything_is_sent(four: ProcessWorld) -> None:
    for rank, text in enumerate(four.call(wrong_shape)):
        assert text.startswith(f"rank {rank} gave a shard of shape (3,)")


# Worlds ---------------------------------------------------------------------------------------------------------------


def join_by_address(port: int, count: int, environment: str) -> list[Any]:
    index = int(os.environ[environment])
    unidist.use("torch")
    before = unidist.process_count()
    unidist.initialize(f"127.0.0.1:{port}", count, index, timeout=60)
    with pytest.raises(BackendMismatchError, match="second time"):
        unidist.initialize()
    with pytest.raises(BackendMismatchError, match="second time"):
        backend().initialize(Cluster())
    found = unidist.distribute(np.arange(5.0), Mesh({"x": -1}), Layout("x")).numpy().tolist()
    names = unidist.list_devices()
    unidist.shutdown()
    assert not dist.is_initialized()
    return [before, unidist.process_count(), names, found]


def _place_of_process(world: ProcessWorld, port: int) -> list[Any]:
    return world.call(join_by_address, port, world.count, "JAX_LOCAL_PROCESS_ID")


def test_joining_by_address_and_leaving() -> None:
    # JAX's launcher gives each process its index; without the address that is no launch.
    with ProcessWorld(2, launcher="jax", env={"JAX_COORDINATOR_ADDRESS": None}, preload=preloaded.TORCH) as processes:
        for _ in range(2):
            found = _place_of_process(processes, free_port())
            assert found == [[1, 1, ["cpu:0", "cpu:1"], [0.0, 1.0, 2.0, 3.0, 4.0]]] * 2


def adopt() -> list[Any]:
    dist.init_process_group("gloo")
    results = []
    for _ in range(2):  # the second adapter finds the groups that the first one left
        unidist.use("torch")
        mesh = Mesh({"x": -1}, list(reversed(range(dist.get_world_size()))))
        results.append(unidist.distribute(np.arange(3.0), mesh, Layout("x")).numpy().tolist())
        unidist.shutdown()
    with pytest.raises(BackendMismatchError, match="process 7"):
        TorchBackend().initialize(Cluster(process_count=2, process_index=7))
    dist.barrier()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return [alive, *results]


def test_a_process_group_that_is_there_is_used_and_left_alive() -> None:
    with ProcessWorld(2, preload=preloaded.TORCH) as processes:
        assert processes.call(adopt) == [[True, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]] * 2


def alone() -> None:
    unidist.use("torch")
    assert unidist.list_devices() == ["cpu:0"]
    assert unidist.list_devices("gpu") == []
    mesh = Mesh({"data": -1, "model": 1})
    x = unidist.distribute(np.arange(4.0), mesh, Layout(("data", "model")))
    assert not dist.is_initialized()
    np.testing.assert_array_equal(unidist.all_gather(x, ("data", "model")).numpy(), np.arange(4.0))
    unidist.barrier()
    assert tuple(backend().mesh(mesh).shape) == (1, 1)
    with pytest.raises(MeshError, match=r"unidist run -n 4 script\.py.*torchrun --nproc-per-node 4"):
        unidist.distribute(np.arange(4.0), Mesh({"x": 4}), Layout("x"))
    unidist.use("torch", devices=2)
    with pytest.raises(MeshError, match="unidist run -n 2"):
        unidist.list_devices()
    with pytest.raises(MeshError, match="rank order"):
        unidist.use("torch", devices=["cpu:3"]).list_devices()
    unidist.shutdown()


def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    with ProcessWorld(1, launcher=None, preload=preloaded.TORCH) as processes:
        processes.call(alone)


def nobody_comes(port: int) -> str:
    unidist.use("torch")
    try:
        unidist.initialize(f"127.0.0.1:{port}", 2, 0, timeout=2)
    except unidist.BackendNotAvailableError as error:
        return str(error)
    return "joined"


def test_a_world_that_does_not_come_together() -> None:
    with ProcessWorld(1, launcher=None, preload=preloaded.TORCH) as processes:
        (text,) = processes.call(nobody_comes, free_port())
        assert "process 0 of 2 could not join" in text
        assert "within 2 s" in text


# Lost peers -----------------------------------------------------------------------------------------------------------


def join_for_seconds(seconds: float) -> None:
    unidist.use("torch")  # joins, as the launcher says
    backend().mesh(Mesh({"x": 2}))
    unidist.initialize(timeout=seconds)


def lose(how: str, noticed: str) -> dict[str, tuple[float, str, str]]:
    """Process 1 goes away; process 0 notices in each call: seconds, the text, the cause's type.

    Args:
        noticed: the file that process 0 makes then, which a process that sleeps wakes for.
    """
    group, x = everyone(), torch.ones(backend().process_count(), 2)
    sizes = (1,) * group.size
    backend().comm.barrier(group)
    if backend().rank == 1:
        if how == "dies":
            os._exit(9)
        wait_until(Path(noticed).exists, "process 0 to notice")
        return {}
    calls = {
        "all_gather": lambda: backend().comm.all_gather(x[:1], group, 0, sizes),
        "reduce_scatter": lambda: backend().comm.reduce_scatter(x, group, 0, sizes, "sum"),
        "all_reduce": lambda: backend().comm.all_reduce(torch.ones(SMALL), group, "sum"),
        "all_reduce over": lambda: backend().comm.all_reduce_inplace(x, group, "sum").wait(),
        "barrier": lambda: backend().barrier(),
    }
    if how == "sleeps":  # the group takes its time to fail, then the first collective
        calls = {"making the process group": lambda: backend().mesh(Mesh({"x": 2}, [1, 0])), **calls}
    found = {}
    for name, call in calls.items():
        start = time.monotonic()
        with pytest.raises(ProcessLostError) as caught:
            call()
        found[name] = time.monotonic() - start, str(caught.value), type(caught.value.__cause__).__name__
        assert flights.how(flights.here().entries[-1]) == "failed"
        assert flights.here().open == ()
    Path(noticed).touch()
    return found


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_lost_peer_is_told(how: str, tmp_path: Path) -> None:
    with ProcessWorld(
        2, setup=join_for_seconds, setup_args=(2.0 if how == "sleeps" else 60.0,), preload=preloaded.TORCH
    ) as processes:
        outcomes = processes.outcomes(lose, how, str(tmp_path / "noticed"))
        assert outcomes[0].failure is None, outcomes[0].failure
        for name, (seconds, text, cause) in outcomes[0].value.items():
            assert seconds < 30
            assert text.startswith(name)
            assert "over ranks [" in text
            assert "start all processes again" in text
            assert cause in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
        if how == "dies":
            assert isinstance(outcomes[1].failure, ProcessFailedError)
            assert outcomes[1].failure.kind == "ended"


def test_other_errors_pass() -> None:
    from unidist.backends.torch.lost import told

    with pytest.raises(RuntimeError, match="shape") as caught, told("all_reduce", (0, 1)):
        raise RuntimeError("shape mismatch")
    assert not isinstance(caught.value, ProcessLostError)
