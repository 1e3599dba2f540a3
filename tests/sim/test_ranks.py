"""VirtualRanks: in its thread a rank sees a local-view backend on torch; NumPy and one process are the judges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampling import unless_all
from unidist.algebra import Group, Layout, Mesh, Sharding, redistribution
from unidist.backends import global_state, registry
from unidist.backends.protocol import Cluster
from unidist.backends.sim import reference
from unidist.backends.sim.ranks import VirtualRanks
from unidist.backends.sim.world import VirtualWorld
from unidist.errors import BackendMismatchError, CapabilityError, DesyncError
from unidist.events import for_purpose
from unidist.ledger import ledger
from unidist.testing import laws, samples

N = 6
SQUARE = Mesh({"data": 2, "model": 2})
# A virtual rank is one of a process that holds them all, and the ledger hears of rank 0 only: tests of their own below.
OTHER_LAWS = {"devices", "ledger", "ledger_of_broadcast_and_permute"}


def ranks_of(count: int) -> Iterator[VirtualRanks]:
    backend = VirtualRanks(VirtualWorld(count))
    yield backend
    everyone = tuple(range(count))
    found = backend.run(lambda r: backend.comm.all_reduce(torch.tensor(r), Group(everyone, r), "sum"))
    assert [int(x) for x in found] == [sum(everyone)] * count
    backend.shutdown()


@pytest.fixture(scope="module")
def six() -> Iterator[VirtualRanks]:
    yield from ranks_of(N)


@pytest.fixture
def four() -> Iterator[VirtualRanks]:
    yield from ranks_of(4)


# The laws of every adapter -----------------------------------------------------------------------------------------


def native(value: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.tensor(np.asarray(value)).to(getattr(torch, dtype))


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()


def vjp(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x, y)[0]


@pytest.mark.parametrize("law", sorted(set(laws.CHECKS) - OTHER_LAWS))
def test_every_rank_finds_the_laws_obeyed(six: VirtualRanks, law: str) -> None:
    with registry.isolated():
        global_state._set(six, "no")
        few = {"layout_pairs": unless_all(14, 24), "layouts": unless_all(8, None)}
        world = laws.World(backend=six, array=native, numpy=numpy, vjp=vjp, **few)
        six.run(lambda rank: laws.run_check(law, world))


@pytest.mark.parametrize("dims", [1, 2])
def test_all_pairs_of_layouts_and_their_gradients_at_once(dims: int) -> None:
    """Every pair of layouts on a 2x3 mesh with permuted devices, uneven: forward and gradient against NumPy."""
    backend = VirtualRanks(VirtualWorld(6))
    mesh = Mesh({"a": 2, "b": 3}, devices=[4, 0, 5, 2, 1, 3])
    kinds = list(samples.layouts(mesh.axis_names, dims))
    for src, dst in itertools.product(kinds, kinds) if dims == 1 else zip(kinds, reversed(kinds), strict=True):
        compare(backend, Sharding(mesh, src, (5, 4)[:dims]), Sharding(mesh, dst, (5, 4)[:dims]))
    backend.shutdown()


def compare(backend: VirtualRanks, src: Sharding, dst: Sharding) -> None:
    rng = np.random.default_rng(3)
    _, x = samples.legal_shards(src, rng)
    _, y = samples.legal_shards(dst.with_layout(dst.layout.dual()), rng)
    wanted, back = reference.run(redistribution(src, dst), x), reference.run(redistribution(src, dst).adjoint, y)

    def fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.tensor(x[rank], requires_grad=True)
        out = backend.redistribute(mine, src, dst)
        return out.detach(), torch.autograd.grad(out, mine, torch.tensor(y[rank]))[0]

    for rank, (out, grad) in enumerate(backend.run(fn)):
        np.testing.assert_array_equal(out.numpy(), wanted[rank])
        np.testing.assert_array_equal(grad.numpy(), back[rank])


# Collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_reductions_are_bitwise_numpys_in_rank_order(six: VirtualRanks, op: Any) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((4, 5)).astype("float32") for _ in range(N)]
    order = (3, 1, 5, 0, 2, 4)
    wanted = reference.reduce([parts[rank] for rank in order], op)

    def fn(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group, x = Group(order, order.index(rank)), torch.tensor(parts[rank])
        out = six.comm.all_reduce(x, group, op)
        piece = six.comm.reduce_scatter(x, group, 1, [2, 0, 1, 1, 0, 1], op)
        assert torch.equal(x, torch.tensor(parts[rank]))
        assert six.comm.all_reduce_inplace(x, group, op).wait() is None
        return out, piece, x

    bounds = [0, 2, 2, 3, 4, 4, 5]
    for rank, (out, piece, inplace) in enumerate(six.run(fn)):
        place = order.index(rank)
        np.testing.assert_array_equal(out.numpy(), wanted)
        np.testing.assert_array_equal(inplace.numpy(), wanted)
        np.testing.assert_array_equal(piece.numpy(), wanted[:, bounds[place] : bounds[place + 1]])


def test_a_slice_keeps_nothing_of_the_whole(four: VirtualRanks) -> None:
    whole = Sharding(SQUARE, Layout(), (4, 6))

    def fn(rank: int) -> None:
        value = torch.ones(4, 6)
        part = four.redistribute(value, whole, whole.with_layout(Layout(None, "data")))
        value.zero_()
        assert torch.equal(part, torch.ones(4, 3))
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes

    four.run(fn)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_buffers_are_filled_and_reduced_in_place(six: VirtualRanks, op: Any) -> None:
    # More than two blocks of a large reduction, and some elements besides.
    values = np.random.default_rng(1).normal(size=(N, N, 25_000)).astype("float32")
    fold = {"sum": np.sum, "mean": np.mean, "max": np.max}[op]
    wanted = fold(values, axis=0)

    def fn(rank: int) -> None:
        here, comm = Group(tuple(range(N)), rank), six.comm
        reduced, part, joined = torch.tensor(values[rank]), torch.empty(1, 25_000), torch.empty(N, 25_000)
        comm.reduce_scatter_into(part, torch.tensor(values[rank]), here, op).wait()
        comm.all_reduce_inplace(reduced, here, op).wait()
        comm.all_gather_into(joined, part, here).wait()
        own = torch.zeros(N, 25_000)
        own[rank] = part[0]
        comm.all_gather_into(own, own[rank : rank + 1], here).wait()
        np.testing.assert_allclose(part.numpy(), wanted[rank : rank + 1], atol=1e-5)
        for found in (reduced, joined, own):
            np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)

    six.run(fn)


def test_uneven_and_empty_pieces_travel(six: VirtualRanks) -> None:
    sizes = [2, 0, 3, 1, 0, 1]
    value = np.arange(7 * 7 * 2).reshape(7, 7, 2)
    starts = np.cumsum([0, *sizes])

    def fn(rank: int) -> None:
        group = Group(tuple(range(N)), rank)
        mine = slice(starts[rank], starts[rank + 1])
        rows, columns = torch.tensor(value[mine]), torch.tensor(value[:, mine])
        assert torch.equal(six.comm.all_gather(rows, group, 0, sizes), torch.tensor(value))
        assert torch.equal(six.comm.all_gather(columns, group, -2, sizes), torch.tensor(value))
        assert torch.equal(six.comm.all_to_all(rows, group, 1, sizes, 0, sizes), columns)
        assert torch.equal(six.comm.all_to_all(columns, group, -3, sizes, -2, sizes), rows)
        # Each place sends its own amounts, cut and joined along one dim: rank r sends r + 1 rows to each.
        sent = torch.arange(N).repeat_interleave(rank + 1)
        got = six.comm.all_to_all(sent, group, 0, [rank + 1] * N, 0, [r + 1 for r in range(N)])
        assert got.tolist() == [rank] * 21

    six.run(fn)


def test_no_rank_writes_into_anothers_result(six: VirtualRanks) -> None:
    group = tuple(range(N))

    def results(rank: int) -> list[torch.Tensor]:
        here, x, comm = Group(group, rank), torch.full((N, 2), float(rank + 1)), six.comm
        found = [
            comm.all_reduce(x, here, "sum"),
            comm.all_gather(x, here, 0, [N] * N),
            comm.reduce_scatter(x, here, 0, [1] * N, "sum"),
            comm.all_to_all(x, here, 0, [1] * N, 1, [2] * N),
            comm.broadcast(x, here, 2),
            comm.permute(x, here, ((0, 1), (2, 2))),
        ]
        six.comm.barrier(here)
        for tensor in found:
            tensor.fill_(-rank)
        six.comm.barrier(here)
        assert torch.equal(x, torch.full((N, 2), float(rank + 1)))
        return found

    for rank, found in enumerate(six.run(results)):
        for tensor in found:
            assert torch.equal(tensor, torch.full_like(tensor, -rank))
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # nothing bigger is kept alive


def test_a_mean_of_integers_is_refused_on_every_rank(four: VirtualRanks) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(CapabilityError, match="cast to a floating dtype"):
            four.comm.all_reduce(torch.tensor([rank]), Group((0, 1, 2, 3), rank), "mean")

    four.run(fn)


# One process as the judge ------------------------------------------------------------------------------------------


def gelu_mlp(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ first) @ second


def test_gradients_equal_those_of_one_process(four: VirtualRanks) -> None:
    """A two-layer network, batch over `data` and hidden units over `model`, uneven: all gradients in double."""
    rng = np.random.default_rng(1)
    x, first, second, y = (rng.standard_normal(shape) for shape in ((7, 3), (3, 5), (5, 2), (7, 2)))
    whole = [torch.tensor(v, requires_grad=True) for v in (x, first, second)]
    loss = ((gelu_mlp(*whole) - torch.tensor(y)) ** 2).sum() / 14
    wanted = [g.numpy() for g in torch.autograd.grad(loss, whole)]

    def sharding(shape: tuple[int, ...], *dims: str | None, **states: Any) -> Sharding:
        return Sharding(SQUARE, Layout(*dims, **states), shape)

    held = [sharding((7, 3), "data"), sharding((3, 5), None, "model"), sharding((5, 2), "model")]
    used = [
        sharding((7, 3), "data", fanout="model"),
        sharding((3, 5), None, "model", fanout="data"),
        sharding((5, 2), "model", fanout="data"),
    ]
    rows = sharding((7, 2), "data")

    def fn(rank: int) -> tuple[torch.Tensor, list[np.ndarray]]:
        mine = [four.distribute(v, s).requires_grad_() for v, s in zip((x, first, second), held, strict=True)]
        there = [four.redistribute(v, h, u) for v, h, u in zip(mine, held, used, strict=True)]
        partial = gelu_mlp(*there)
        out = four.redistribute(partial, rows.with_layout(Layout("data", partial="model")), rows)
        assert partial.shape[0] == (4, 3)[rank // 2]
        local = ((out - four.distribute(y, rows)) ** 2).sum() / 14
        total = sharding((), partial="data")
        local = four.redistribute(local, total, total.with_layout(Layout()))
        grads = torch.autograd.grad(local, mine)
        return local.detach(), [four.gather(g, s) for g, s in zip(grads, held, strict=True)]

    with ledger() as traffic:
        results = four.run(fn)
    assert traffic.count("all_reduce") > 3
    for value, grads in results:
        np.testing.assert_allclose(value, loss.detach(), rtol=1e-12)
        for found, right in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients_cross_ranks(four: VirtualRanks) -> None:
    mesh = Mesh({"x": 4})
    cut, whole = (Sharding(mesh, layout, (4,)) for layout in (Layout("x"), Layout(fanout="x")))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def fn(rank: int) -> float:
        x = values[rank : rank + 1].clone().requires_grad_()
        gathered = four.redistribute(x, cut, whole)
        (grad,) = torch.autograd.grad((gathered**3).sum() / 4, x, create_graph=True)
        assert torch.allclose(grad, 3 * x**2)
        return torch.autograd.grad(grad.sum(), x)[0].item()

    assert four.run(fn) == [6.0, 12.0, 18.0, 24.0]


def test_two_trainings_are_bitwise_equal() -> None:
    def train() -> list[torch.Tensor]:
        backend, mesh = VirtualRanks(VirtualWorld(8)), Mesh({"data": 8})
        torch.manual_seed(0)
        x, y = torch.randn(64, 16), torch.randn(64, 4)
        shared = torch.randn(16, 4)

        def fn(rank: int) -> torch.Tensor:
            weight = shared.clone().requires_grad_()
            here = mesh.group("data", rank)
            for _ in range(20):
                noise = torch.rand(8, 16)  # one generator for all ranks: its order is the ranks' turns
                out = torch.tanh((x[8 * rank : 8 * rank + 8] * noise) @ weight)
                ((out - y[8 * rank : 8 * rank + 8]) ** 2).sum().backward()
                assert weight.grad is not None
                backend.comm.all_reduce_inplace(weight.grad, here, "mean").wait()
                with torch.no_grad():
                    weight -= 0.01 * weight.grad
                weight.grad = None
            return weight.detach()

        found = backend.run(fn)
        backend.shutdown()
        return found

    first, second = train(), train()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(first[0], other) for other in first)


# Desyncs -----------------------------------------------------------------------------------------------------------


def desync(backend: VirtualRanks, fn: Callable[[int], Any], *words: str) -> DesyncError:
    with pytest.raises(DesyncError) as caught:
        backend.run(fn)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in:\n{caught.value}"
    return caught.value


def reduced(backend: VirtualRanks, x: torch.Tensor, *, axis: str = "data") -> torch.Tensor:
    src = Sharding(SQUARE, Layout(partial=axis), tuple(x.shape))
    with for_purpose("dense/kernel"):
        return backend.redistribute(x, src, src.with_layout(Layout()))


def test_a_rank_that_leaves_its_row_on_a_2x2_mesh(four: VirtualRanks) -> None:
    def fn(rank: int) -> None:
        reduced(four, torch.ones(2, 3), axis="model")
        if rank != 1:
            reduced(four, torch.ones(2, 3))

    error = desync(
        four,
        fn,
        "rank 3 waits in all_reduce(op=sum) of float32 (2, 3) over ('data',) in the group of ranks 1, 3 "
        "for 'dense/kernel' at test_ranks.py:",
        "where rank 1 is missing",
        "ranks 0-2 ended",
    )
    assert (error.ranks, error.collective, error.variable) == ((1, 3), "all_reduce", "dense/kernel")


DIFFERENT: dict[str, tuple[Callable[[VirtualRanks], Any], str]] = {
    "shape": (lambda b: reduced(b, torch.ones(3, 2)), "all_reduce(op=sum) of float32 (3, 2) over ('data',)"),
    "dtype": (lambda b: reduced(b, torch.ones(2, 3).double()), "all_reduce(op=sum) of float64 (2, 3)"),
    "collective": (
        lambda b: b.comm.all_gather(torch.ones(2, 3), SQUARE.group("data", b.rank), 0, [2, 2]),
        "all_gather(dim=0, sizes=(2, 2)) of float32 (?, 3)",
    ),
    "op": (
        lambda b: b.comm.all_reduce(torch.ones(2, 3), SQUARE.group("data", b.rank), "max"),
        "all_reduce(op=max) of float32 (2, 3)",
    ),
    "barrier": (lambda b: b.barrier(SQUARE, ("data",)), "barrier() over ('data',) in the group of ranks 0, 2"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_call_different_collectives(four: VirtualRanks, kind: str) -> None:
    other, words = DIFFERENT[kind]
    error = desync(
        four,
        lambda rank: other(four) if rank == 2 else reduced(four, torch.ones(2, 3)),
        "the virtual ranks 0, 2 disagree",
        "rank 0 calls all_reduce(op=sum) of float32 (2, 3) over ('data',) in the group of ranks 0, 2",
        f"rank 2 calls {words}",
    )
    assert (error.ranks, error.collective, error.variable) == ((0, 2), "all_reduce", "dense/kernel")


def test_a_piece_of_the_wrong_length(four: VirtualRanks) -> None:
    group = (0, 1, 2, 3)
    with pytest.raises(DesyncError, match=r"all_gather .* rank 3 gave an array of shape \(2, 5\).* 1 long along dim 0"):
        four.run(lambda r: four.comm.all_gather(torch.ones(2 if r == 3 else 1, 5), Group(group, r), 0, [1] * 4))
    with pytest.raises(DesyncError, match=r"all_to_all .* rank 0 expects pieces of length \[1, 1, 1, 1\] along dim 1"):
        four.run(
            lambda r: four.comm.all_to_all(torch.ones(4, 2 if r == 3 else 1), Group(group, r), 0, [1] * 4, 1, [1] * 4)
        )


@pytest.mark.parametrize("where", ["a function's backward", "a hook"])
def test_a_rank_that_raises_in_backward_while_others_wait_there(four: VirtualRanks, where: str) -> None:
    unwound: list[int] = []

    def in_step(rank: int, grad: torch.Tensor) -> torch.Tensor:
        if rank == 3:
            raise ArithmeticError("bad gradient")
        try:
            return reduced(four, grad)
        except Exception:  # must not hold up the unwinding
            return grad
        finally:
            unwound.append(rank)

    def fn(rank: int) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        if where == "a hook":
            x.register_hook(lambda grad: in_step(rank, grad))
            y = x * 2
        else:
            y = four.ops.differentiable(lambda v: v.clone(), lambda grad: in_step(rank, grad), x)
        y.sum().backward()
        reduced(four, x.detach())
        unwound.append(-1)

    with pytest.raises(ArithmeticError, match="bad gradient") as caught:
        four.run(fn)
    assert "rank 3 of 4" in caught.value.__notes__
    assert sorted(unwound) == [0, 1, 2]


# What a rank thread brings along -------------------------------------------------------------------------------------


def torch_state(backend: VirtualRanks) -> list[tuple[Any, ...]]:
    return backend.run(
        lambda rank: (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.empty(1).device.type,
            torch.empty(1).dtype,
        )
    )


def test_the_callers_torch_state_holds_in_the_ranks_for_that_run(four: VirtualRanks) -> None:
    plain = [(True, False, False, torch.bfloat16, True, "cpu", torch.float32)] * 4
    assert torch_state(four) == plain
    with torch.no_grad():
        assert [state[:2] for state in torch_state(four)] == [(False, False)] * 4
    with torch.inference_mode():
        assert [state[:2] for state in torch_state(four)] == [(False, True)] * 4
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert [state[2:5] for state in torch_state(four)] == [(True, torch.float16, False)] * 4
    with torch.device("meta"):
        assert [state[5] for state in torch_state(four)] == ["meta"] * 4
    torch.set_default_dtype(torch.float64)
    try:
        assert [state[6] for state in torch_state(four)] == [torch.float64] * 4
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch_state(four) == plain


def test_many_ranks_share_the_computing_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for count, each in ((4, 3), (32, 2), (64, 1)):
            backend = VirtualRanks(VirtualWorld(count))
            assert backend.run(lambda rank: torch.get_num_threads()) == [each] * count
            assert torch.get_num_threads() == 3
            backend.shutdown()
    finally:
        torch.set_num_threads(before)


def test_accelerators_too_would_run_backward_in_the_ranks_own_thread(four: VirtualRanks) -> None:
    assert four.run(lambda rank: torch.autograd.is_multithreading_enabled()) == [False] * 4
    assert torch.autograd.is_multithreading_enabled()


# What it says of itself ----------------------------------------------------------------------------------------------


def test_only_rank_0_reports_to_the_ledger(four: VirtualRanks) -> None:
    with ledger() as traffic:
        four.run(lambda rank: reduced(four, torch.ones(2, 3)))
        four.run(lambda rank: reduced(four, torch.ones(2, 3), axis="model") if rank > 1 else None)
    assert [(e.op, e.axes, e.ranks, e.bytes, e.purpose) for e in traffic.events] == [
        ("all_reduce", ("data",), (0, 2), 24, "dense/kernel")
    ]


def test_a_gradient_is_sent_for_what_its_value_was(four: VirtualRanks) -> None:
    cut = Sharding(SQUARE, Layout("data"), (4,))

    def step(rank: int) -> None:
        x = torch.ones(2, requires_grad=True)
        with for_purpose("a layer"):
            whole = four.redistribute(x, cut, cut.with_layout(Layout(fanout="data")))
        whole.sum().backward()

    with ledger() as traffic:
        four.run(step)
    assert [(e.op, e.purpose) for e in traffic.events] == [("all_gather", "a layer"), ("reduce_scatter", "a layer")]


def test_devices_and_processes(four: VirtualRanks) -> None:
    assert four.list_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert four.list_devices("gpu") == []
    assert (four.name, four.process_index(), four.process_count()) == ("sim", 0, 1)
    assert four.run(lambda rank: (four.rank, four.local_ranks())) == [(r, (r,)) for r in range(4)]
    four.initialize(Cluster())
    with pytest.raises(BackendMismatchError, match="one process"):
        four.initialize(Cluster(process_count=2))
    with pytest.raises(CapabilityError, match="'MainThread' is no virtual rank"):
        _ = four.rank
    assert VirtualRanks(four.world).world.on_enter == four.world.on_enter[:1]
