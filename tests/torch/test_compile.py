"""torch.compile takes programs with moves as one graph, and they compute the same as eager ones and as one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from unidist import events
from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.local import LocalViewBackend
from unidist.testing.processes import ProcessWorld

FEATURES, HIDDEN, STEPS = 6, 10, 4


@pytest.fixture(scope="module", params=unless_all([2], [2, 4]))
def world(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    with ProcessWorld(request.param, setup=join, timeout=280, preload=preloaded.TORCH) as processes:
        yield processes


def join() -> None:
    torch.manual_seed(0)
    unidist.use("torch")


def backend() -> LocalViewBackend[torch.Tensor]:
    return unidist.backend()  # type: ignore[return-value]


# A multilayer perceptron by hand: columns, then rows ------------------------------------------------------------------


def _data() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(*shape, generator=draw) / 3 for shape in ((FEATURES, HIDDEN), (HIDDEN, 3))]
    return weights, torch.randn(5, FEATURES, generator=draw), torch.randn(5, 3, generator=draw)


def train_alone() -> tuple[list[float], list[np.ndarray]]:
    weights, x, target = _data()
    weights = [w.requires_grad_() for w in weights]
    losses = []
    for _ in range(STEPS):
        loss = ((torch.relu(x @ weights[0]) @ weights[1] - target) ** 2).mean()
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, weights)
        weights = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(weights, grads, strict=True)]
    return losses, [w.detach().numpy() for w in weights]


def train_sharded(how: str | None) -> tuple[list[float], list[np.ndarray], int, int]:
    """Losses, gathered weights, elements of the first shard, collectives counted in eager mode or graphs compiled."""
    mesh = Mesh({"model": -1}, list(reversed(range(len(unidist.list_devices())))))
    weights, x, target = _data()
    layouts = Layout(None, "model"), Layout("model")
    placed = [unidist.distribute(w, mesh, layout) for w, layout in zip(weights, layouts, strict=True)]
    shards = [p.data.clone().requires_grad_() for p in placed]
    whole = Sharding(mesh, Layout(), tuple(x.shape))
    fanned = whole.with_layout(Layout(fanout="model"))

    def loss_of(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(backend().redistribute(x * 1, whole, fanned) @ first)
        out = hidden @ second
        # A sharding that is made in the program, from a shape that is only known there.
        partial = Sharding(mesh, Layout(partial="model"), tuple(out.shape))
        out = backend().redistribute(out, partial, partial.with_layout(Layout()))
        return ((out - target) ** 2).mean()

    graphs: list[Any] = []
    program = loss_of if how is None else torch.compile(loss_of, fullgraph=True, backend=_counting(how, graphs))
    losses, seen = [], []
    x.requires_grad_()  # so that the adjoint of I -> F is there too
    with events.listen(seen.append):
        for _ in range(STEPS):
            loss = program(x, *shards)
            losses.append(loss.item())
            grads = torch.autograd.grad(loss, [*shards, x])
            shards = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(shards, grads, strict=False)]
    values = [
        unidist.from_local([w.detach()], mesh, p.layout, shape=p.shape) for w, p in zip(shards, placed, strict=True)
    ]
    return losses, [v.numpy() for v in values], shards[0].numel(), len(graphs) if how else len(seen)


def _counting(how: str, graphs: list[Any]) -> Callable[..., Any]:
    """The named compiler; the graphs that it was given are kept."""
    compiler = torch._dynamo.lookup_backend(how)

    def compiled(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return compiler(graph, inputs, **options)

    return compiled


@pytest.mark.parametrize("how", [None, "aot_eager", "inductor"])
def test_a_sharded_perceptron_trains_like_one_process(world: ProcessWorld, how: str | None) -> None:
    losses, weights = train_alone()
    for found_losses, found_weights, held, count in world.call(train_sharded, how):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        for found, wanted in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert held <= -(-HIDDEN // world.count) * FEATURES
        assert count == (2 * STEPS if how is None else 1)  # one all_reduce forward and one backward; one graph


# Every move -----------------------------------------------------------------------------------------------------------

MOVES = [
    (Layout("x"), Layout()),
    (Layout(None, "x"), Layout(fanout="x")),
    (Layout("x"), Layout(None, "x")),
    (Layout(None, "x"), Layout("x")),
    (Layout(partial="x"), Layout()),
    (Layout(partial="x"), Layout("x")),
    (Layout(partial="x"), Layout(None, "x")),
    (Layout(partial="x"), Layout(fanout="x")),
    (Layout(partial={"x": "mean"}), Layout()),
    (Layout(), Layout(None, "x")),
    (Layout(fanout="x"), Layout("x")),
    (Layout("x"), Layout(partial="x")),
    (Layout(fanout="x"), Layout(partial="x")),
    (Layout(), Layout(fanout="x")),
]


Program = Callable[[torch.Tensor], torch.Tensor]


def differences_of_moves(shape: tuple[int, ...], reverse: bool) -> float:
    """The greatest difference between eager and compiled values and gradients, over all moves."""
    count, rank = len(backend().list_devices()), backend().rank
    mesh = Mesh({"x": count}, range(count)[:: -1 if reverse else 1])
    draw = torch.Generator().manual_seed(rank)
    moves: list[tuple[Program, torch.Tensor, torch.Tensor]] = []
    for first, last in MOVES:
        src, dst = Sharding(mesh, first, shape), Sharding(mesh, last, shape)
        x, y = (torch.randn(s.local_shape(rank), generator=draw) for s in (src, dst))
        moves.append((lambda x, src=src, dst=dst: backend().redistribute(x, src, dst), x, y))  # type: ignore[misc]
    whole = Sharding(mesh, Layout(), shape)
    x, y = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    moves.append((lambda x: backend().broadcast(x, whole, ("x",), 1), x, y))
    for pairs in (((0, 1),), ((0, 1), (1, 0)), ()):
        moves.append((lambda x, pairs=pairs: backend().permute(x, whole, ("x",), pairs), x, y))  # type: ignore[misc]
    return _difference(moves)


def _difference(moves: list[tuple[Program, torch.Tensor, torch.Tensor]]) -> float:
    def program(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [move(x * 1) for (move, _, _), x in zip(moves, given, strict=True)]

    torch._dynamo.reset()
    results = []
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        given = [x.clone().requires_grad_() for _, x, _ in moves]
        out = run(given)
        results.append([*(o.detach() for o in out), *torch.autograd.grad(out, given, [y for _, _, y in moves])])
    assert [r.shape for r in results[0]] == [r.shape for r in results[1]]
    return max([float((a - b).abs().max()) for a, b in zip(*results, strict=True) if a.numel()], default=0.0)


@pytest.mark.parametrize(("shape", "reverse"), [((8, 4), False), ((7, 3), True), ((1, 5), True)])
def test_every_move_compiles_to_the_same_values_and_gradients(
    world: ProcessWorld, shape: tuple[int, ...], reverse: bool
) -> None:
    assert max(world.call(differences_of_moves, shape, reverse)) < 1e-6


def compiled_extremes() -> list[list[bool]]:
    """Which values of a max over the ranks are NaN, of contributions that hold one each: reduced and scattered."""
    count, rank = len(backend().list_devices()), backend().rank
    src = Sharding(Mesh({"x": count}), Layout(partial={"x": "max"}), (count + 1,))
    x = torch.arange(count + 1.0)
    x[rank] = torch.nan

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [backend().redistribute(x * 1, src, src.with_layout(to)) for to in (Layout(), Layout("x"))]

    torch._dynamo.reset()
    return [out.isnan().tolist() for out in torch.compile(program, fullgraph=True, backend="aot_eager")(x)]


def test_a_compiled_max_of_nan_is_nan(world: ProcessWorld) -> None:
    found = world.call(compiled_extremes)
    wanted = [True] * world.count + [False]
    assert [whole for whole, _ in found] == [wanted] * world.count
    assert [bit for _, part in found for bit in part] == wanted


def losses_of_batches() -> tuple[list[float], list[float]]:
    """A compiled program that is called with batches of several sizes, and the same in eager mode."""
    mesh = Mesh({"x": -1})

    def program(x: torch.Tensor) -> torch.Tensor:
        rows = Sharding(mesh, Layout(partial="x"), tuple(x.shape))
        return (backend().redistribute(x * 2, rows, rows.with_layout(Layout())) ** 2).sum()

    batches = [torch.arange(2.0 * n).view(n, 2) + backend().rank for n in (4, 6, 5, 9, 4)]
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    return [program(b).item() for b in batches], [compiled(b).item() for b in batches]


def test_batches_of_several_sizes(world: ProcessWorld) -> None:
    for eager, compiled in world.call(losses_of_batches):
        np.testing.assert_allclose(compiled, eager, rtol=1e-6)


def second_derivative() -> str:
    torch._dynamo.reset()
    src = Sharding(Mesh({"x": -1}), Layout(partial="x"), (3,))
    program = torch.compile(
        lambda x: (backend().redistribute(x, src, src.with_layout(Layout())) ** 3).sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    x = torch.ones(3, requires_grad=True)
    try:
        (gradient,) = torch.autograd.grad(program(x), x, create_graph=True)
        torch.autograd.grad(gradient.sum(), x)
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_gradients_of_gradients_of_compiled_programs_are_refused(world: ProcessWorld) -> None:
    assert set(world.call(second_derivative)) == {"RuntimeError"}


def gathered_together(rounds: int, sizes: tuple[int, ...]) -> int:
    """How many gathers of these sizes, all under way at once, are wrong."""
    mesh = Mesh({"data": -1}, list(range(len(unidist.list_devices()))))
    rank, places = unidist.process_index(), torch.arange(mesh.size, dtype=torch.float32)[:, None]
    group = mesh.group(("data",), rank)
    wrong = 0
    for _ in range(rounds):
        parts = [torch.full((1, size), float(k * mesh.size + rank)) for k, size in enumerate(sizes)]
        begun = [backend().begin("all_gather", part, ("data",), group) for part in parts]
        found = [backend().arrived("all_gather", x) for x in begun]
        wrong += sum(not torch.equal(x, (k * mesh.size + places).expand_as(x)) for k, x in enumerate(found))
    return wrong


def test_gathers_of_programs_that_are_under_way_together_do_not_mix(world: ProcessWorld) -> None:
    """gloo's own, as torch's functional collectives call it, would write beyond the memory of the smaller ones."""
    sizes = (5240, 1024, 5637, 4014, 5242, 17, 2048, 301)
    assert set(world.call(gathered_together, 300, sizes)) == {0}
