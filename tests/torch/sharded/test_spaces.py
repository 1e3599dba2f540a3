"""Carriers of several spaces: of rows, whose parts may be carriers of features."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from unidist import events
from unidist.algebra import Mesh
from unidist.backends.sim.ranks import VirtualRanks
from unidist.backends.sim.world import VirtualWorld
from unidist.backends.torch.sharded import Space, distribute, wrap
from unidist.backends.torch.sharded.tensor import moved
from unidist.propagation.layouts import PARTIAL, WHOLE, chunked


def spaces() -> Any:
    """Virtual ranks on a mesh of 2 x 2, and what gives one its spaces: of rows, and an invariant one of features."""
    mesh = Mesh({"data": 2, "model": 2})
    backend = VirtualRanks(VirtualWorld(4))
    rows, features = (("data",),), (("model",),)
    return backend, lambda: (Space.of(backend, mesh, rows), Space.of(backend, mesh, features, invariant=True))


def test_writes_into_parts_that_are_carriers() -> None:
    backend, made = spaces()

    def program(rank: int) -> None:
        outer, inner = made()
        whole = torch.arange(32.0).reshape(4, 8)
        own = distribute(whole, outer.spec((chunked(0, 4, 2),), (4, 8))).local
        x: Any = wrap(distribute(own, inner.spec((chunked(1, 8, 2),), (2, 8))), outer.spec((chunked(0, 4, 2),), (4, 8)))
        x[:, 3] = 7.0
        x += 1.0
        x[1] = torch.zeros(8)
        whole[:, 3] = 7.0
        whole += 1.0
        whole[1] = 0.0
        assert torch.equal(x.whole(), whole)

    backend.run(program)


def test_statistics_of_rows_whose_features_are_cut() -> None:
    """What a function writes into what was made for it goes back into a part that is a carrier."""
    backend, made = spaces()
    x, wanted = torch.arange(24.0).reshape(4, 6).cos(), torch.arange(6.0)
    plain = F.batch_norm(x, wanted, torch.ones(6), training=True)

    def program(rank: int) -> None:
        outer, inner = made()
        rows, whole = outer.spec((chunked(0, 4, 2),), (4, 6)), outer.spec((chunked(0, 6, 2),), (6,))
        mean = distribute(torch.arange(6.0), whole).local
        cut: Any = wrap(distribute(mean, inner.spec((PARTIAL,), (3,))), whole)
        part = distribute(distribute(x, rows).local, inner.spec((chunked(1, 6, 2),), (2, 6)))
        found: Any = F.batch_norm(wrap(part, rows), cut, torch.ones(6), training=True)
        torch.testing.assert_close(found.whole(), plain)
        torch.testing.assert_close(cut.whole(), wanted)

    backend.run(program)


def test_a_leaf_that_was_written_to_where_it_is_whole_stays_a_leaf() -> None:
    """A table whose columns are cut, in a step over rows, is brought to a norm before it is read."""
    backend, made = spaces()
    places, wanted = torch.tensor([[0, 1], [1, 3]]), torch.arange(20.0).reshape(4, 5).requires_grad_()
    F.embedding(places, wanted, max_norm=1.0).square().sum().backward()

    def program(rank: int) -> None:
        outer, inner = made()
        table = distribute(torch.arange(20.0).reshape(4, 5), inner.spec((chunked(1, 5, 2),), (4, 5)))
        table.local.requires_grad_()
        rows: Any = distribute(places, outer.spec((chunked(0, 2, 2),), (2, 2)))
        found: Any = F.embedding(rows, wrap(table, outer.whole((4, 5))), max_norm=1.0)
        found.square().sum().backward()
        torch.testing.assert_close(table.local.detach(), wanted.detach().split((3, 2), 1)[inner.places[0]])
        torch.testing.assert_close(table.whole().detach(), wanted.detach())
        assert wanted.grad is not None
        own = outer.all_reduce(table.local.grad, (0,))
        torch.testing.assert_close(own, wanted.grad.split((3, 2), 1)[inner.places[0]])

    backend.run(program)


def test_a_leaf_without_a_gradient_that_was_written_to_keeps_its_memory() -> None:
    """What is written into the whole is in the part of whoever keeps it."""
    backend, made = spaces()
    table = torch.arange(20.0).reshape(4, 5)

    def program(rank: int) -> None:
        _, inner = made()
        kept = table.split((3, 2), 1)[inner.places[0]].clone()
        x: Any = wrap(kept, inner.spec((chunked(1, 5, 2),), (4, 5)))
        x.whole().mul_(2)
        torch.testing.assert_close((x + 1).whole(), 2 * table + 1)
        torch.testing.assert_close(kept, 2 * table.split((3, 2), 1)[inner.places[0]])

    backend.run(program)


def test_what_was_only_broadcast_is_joined_once() -> None:
    backend, made = spaces()

    def program(rank: int) -> None:
        _, space = made()
        bias = torch.arange(8.0, requires_grad=True)
        x = distribute(torch.ones(4, 8), space.spec((chunked(1, 8, 2),), (4, 8)))
        with events.listen(sent.append) if rank == 0 else contextlib.nullcontext():
            y: Any = x * bias.expand(4, 8)
            y.whole().sum().backward()
        assert bias.grad is not None
        assert torch.equal(bias.grad, torch.full((8,), 4.0))

    sent: list[events.Event] = []
    backend.run(program)
    # Forward the products, of 4 x 8 numbers; backward one gradient for each number of the bias.
    assert [(e.op, e.bytes) for e in sent] == [("all_gather", 4 * 8 * 4 / 2), ("all_gather", 8 * 4 / 2)]


def test_features_beside_rows() -> None:
    backend, made = spaces()

    def program(rank: int) -> None:
        outer, inner = made()
        x, w = torch.arange(32.0).reshape(4, 8), torch.arange(8.0)
        rows = distribute(x, outer.spec((chunked(0, 4, 2),), (4, 8)))
        weight = distribute(w, inner.spec((chunked(0, 8, 2),), (8,)))
        weight.local.requires_grad_()
        y: Any = rows * weight
        assert tuple(y.local.local.shape) == (2, 4)
        assert torch.equal(y.whole().detach(), x * w)
        y.sum().backward()
        # Of rows each rank has a summand.
        own = outer.all_reduce(weight.local.grad, (0,))
        assert torch.equal(own, x.sum(0)[weight.spec.space.places[0] * 4 :][:4])

    backend.run(program)


def test_who_has_no_rows_lays_features_out_as_who_has_some() -> None:
    """One row on two ranks: a stack with cut features, whose parts meet again over the rows."""
    backend, made = spaces()
    x = torch.arange(8.0).reshape(1, 2, 4).requires_grad_()

    def program(rank: int) -> None:
        outer, inner = made()
        rows: Any = distribute(x, outer.spec((chunked(0, 1, 2),), x.shape))
        cut = wrap(distribute(x, inner.spec((chunked(2, 4, 2),), x.shape)), outer.whole(x.shape))
        found: Any = torch.stack([x, rows, cut], -1)
        assert torch.equal(found.whole(), torch.stack([x] * 3, -1))

    backend.run(program)


def test_products_are_not_turned_to_heads_that_are_cut() -> None:
    """Of queries and keys one axis cuts places, and one heads: rows are turned to, and no head is sent."""
    backend, _ = spaces()
    mesh, sent = Mesh({"data": 2, "model": 2}), set()
    shape = (2, 4, 2, 3)  # rows, places, heads, features
    q, k = torch.arange(48.0).reshape(shape).cos(), torch.arange(48.0).reshape(shape).sin()

    def program(rank: int) -> None:
        outer, inner = (Space.of(backend, mesh, ((axis,),), invariant=True) for axis in mesh.axis_names)
        outer.holds, outer.turns = True, "always"

        def carried(x: torch.Tensor) -> Any:
            part = distribute(x, outer.spec((chunked(1, 4, 2),), shape)).local.clone()
            return wrap(
                distribute(part, inner.spec((chunked(2, 2, 2),), part.shape)),
                outer.spec_of((chunked(1, 4, 2),), part.shape),
            )

        scores: Any = torch.einsum("bquh,bkuh->buqk", carried(q), carried(k))
        assert outer.spec((chunked(0, 2, 2),), scores.shape) is scores.spec
        assert tuple(scores.local.local.shape) == (1, 1, 4, 4)
        assert torch.allclose(scores.whole(), torch.einsum("bquh,bkuh->buqk", q, k))

    with events.listen(lambda event: sent.add((event.op, event.axes))):
        backend.run(program)
    assert ("all_to_all", ("data",)) in sent


def test_parts_of_other_sizes_are_laid_out_alike() -> None:
    """What is cheapest for three columns is not so for two: their features meet again over the columns."""
    backend, made = spaces()
    x, y = torch.arange(5.0).reshape(5, 1), torch.arange(1.0, 6.0)

    def program(rank: int) -> None:
        outer, inner = made()
        rows = distribute(x.double(), inner.spec((chunked(0, 5, 2),), x.shape))
        rows.local.requires_grad_()
        part = distribute(y.double(), outer.spec((chunked(0, 5, 2),), y.shape)).local
        sums = wrap(part * (rank % 2), inner.spec((PARTIAL,), part.shape))
        found: Any = wrap(rows, outer.whole(x.shape)) * wrap(sums, outer.spec((chunked(0, 5, 2),), y.shape))
        assert torch.equal(found.whole(), (x * y).double())
        found.sum().backward()

    backend.run(program)


def test_moves_of_rows_join_features() -> None:
    """Of rows whose features are cut: an extreme, a cumulative sum over rows, and a cast that rounds in backward."""
    backend, made = spaces()
    values = torch.arange(32.0, dtype=torch.float32).reshape(4, 8).cos()

    def compute(x: Any) -> Any:
        return torch.cumsum(x, 0) * torch.amax(x, 0) + x.to(torch.bfloat16).to(torch.float32).mean(0)

    plain = values.clone().requires_grad_()
    compute(plain).sum().backward()

    def program(rank: int) -> None:
        outer, inner = made()
        own = distribute(values, outer.spec((chunked(0, 4, 2),), (4, 8))).local
        part = distribute(own, inner.spec((chunked(1, 8, 2),), (2, 8)))
        part.local.requires_grad_()
        x: Any = wrap(part, outer.spec((chunked(0, 4, 2),), (4, 8)))
        y = compute(x)
        torch.testing.assert_close(y.whole().detach(), compute(values))
        y.sum().backward()
        assert plain.grad is not None
        row, column = outer.places[0] * 2, inner.places[0] * 4
        torch.testing.assert_close(part.local.grad, plain.grad[row : row + 2, column : column + 4])

    backend.run(program)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    "compute",
    [lambda row, x: torch.where(row.expand(4, 8) > 0, x, 0.0), lambda row, x: row.expand(4, 8).max(1)],
    ids=["where", "max"],
)
def test_what_is_made_of_a_view_that_needed_all_features_is_plain(compute: Any, gradient: bool) -> None:
    """A dim of one feature that is broadcast is gathered: the view of it stays a carrier, and nothing behind it."""
    backend, made = spaces()
    row, x = torch.tensor([[1.0], [-1.0], [2.0], [-3.0]]), torch.arange(32.0).reshape(4, 8).cos()

    def program(rank: int) -> None:
        _, space = made()
        cut = distribute(row, space.spec((chunked(1, 1, 2),), (4, 1)))
        given = x.clone().requires_grad_(gradient)
        for found, wanted in zip(tree_leaves(compute(cut, given)), tree_leaves(compute(row, x)), strict=True):
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found.detach(), wanted)

    backend.run(program)


@pytest.mark.parametrize(
    "draw", [torch.rand_like, F.dropout, F.dropout1d, torch.bernoulli], ids=lambda draw: draw.__name__
)
def test_what_is_drawn_for_sums_of_features_is_plain(draw: Any) -> None:
    backend, made = spaces()

    def program(rank: int) -> Any:
        _, space = made()
        x: Any = distribute(torch.full((4, 8), 0.5), space.spec((PARTIAL,), (4, 8)))
        found = draw(x)
        assert type(found) is torch.Tensor
        return found

    one, other, *_ = backend.run(program)
    assert torch.equal(one, other)


def test_heads_that_each_rank_computes_are_cut_for_nothing() -> None:
    """They are whole with a partial gradient, and so is what is made of them and of plain tensors."""
    backend, made = spaces()

    def program(rank: int) -> None:
        _, space = made()
        heads = distribute(torch.ones(4, 3), space.whole((4, 3)))
        heads.local.requires_grad_()
        others = distribute(torch.arange(6.0), space.spec((chunked(0, 6, 2),), (6,)))
        with events.listen(sent.append):
            y: Any = (heads * torch.ones(3)).repeat_interleave(2, 1) * others
            y.sum().backward()
        assert not sent
        own = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 9.0]])[space.places[0]]
        torch.testing.assert_close(heads.local.grad, own.expand(4, 3))

    sent: list[events.Event] = []
    backend.run(program)


def test_what_was_gathered_serves_who_needs_all_of_it() -> None:
    """A product takes the whole beside a cut kernel, then somebody reads it: one all_gather, one sum of gradients."""
    backend, made = spaces()

    def program(rank: int) -> None:
        _, space = made()
        x: Any = distribute(torch.ones(4, 8), space.spec((chunked(0, 4, 2),), (4, 8)))
        x.local.requires_grad_()
        with events.listen(sent.append) if rank == 0 else contextlib.nullcontext():
            (moved(x, (WHOLE,)).sum() * space.places[0] + x.whole().sum()).backward()
        torch.testing.assert_close(x.local.grad, torch.full((2, 8), 2.0))

    sent: list[events.Event] = []
    backend.run(program)
    assert [e.op for e in sent] == ["all_gather", "reduce_scatter"]


def test_a_sum_that_was_joined_for_plain_code_is_joined_once() -> None:
    """A norm takes it and goes on with plain tensors; then it is added to something. Its gradient comes whole."""
    backend, made = spaces()

    def program(rank: int) -> None:
        _, space = made()
        x: Any = distribute(torch.ones(4, 8), space.spec((PARTIAL,), (4, 8)))
        x.local.requires_grad_()
        with events.listen(sent.append) if rank == 0 else contextlib.nullcontext():
            normed = F.layer_norm(x, (8,))
            y = x + normed * 2.0
            assert type(normed) is type(y) is torch.Tensor
            y.sum().backward()
        torch.testing.assert_close(x.local.grad, torch.ones(4, 8))

    sent: list[events.Event] = []
    backend.run(program)
    assert [e.op for e in sent] == ["all_reduce"]
