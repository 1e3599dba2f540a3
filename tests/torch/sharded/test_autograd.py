"""What asks torch for gradients of carriers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.torch.sharded.lockstep import World
from unidist.backends.torch.sharded import Space, distribute, entrances, wrap
from unidist.errors import CapabilityError
from unidist.ledger import ledger
from unidist.propagation.layouts import PARTIAL, WHOLE, State, chunked

Tensor = torch.Tensor
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(scope="module")
def world() -> World:
    return World(data=3)


def leaf(space: Space, x: Tensor, state: State) -> Any:
    return wrap(
        distribute(x, space.spec((state,), x.shape)).local.detach().clone().requires_grad_(),
        space.spec((state,), x.shape),
    )


def rows(space: Space, x: Tensor = X) -> Any:
    return leaf(space, x, chunked(0, x.shape[0], space.sizes[0]))


def loss(x: Any, w: Any) -> Any:
    return (torch.tanh(x @ w).sum(-1) ** 2).mean()


def plain(f: Callable[..., Any], *values: Tensor) -> list[Tensor]:
    given = [v.clone().requires_grad_() for v in values]
    f(*given).backward()
    return [v.grad for v in given]  # type: ignore[misc]


def test_a_plain_weight_gets_its_share_of_the_gradient(world: World) -> None:
    def program(space: Space) -> Tensor:
        w = W.clone().requires_grad_()
        loss(rows(space), w).backward()
        return w.grad  # type: ignore[return-value]

    shares = world.run(program)
    assert not torch.allclose(shares[0], shares[1])
    torch.testing.assert_close(sum(shares), plain(loss, X, W)[1])


@pytest.mark.parametrize("state", [PARTIAL, chunked(0, 5, 3), chunked(1, 4, 3)], ids=str)
def test_a_function_may_write_into_a_leaf_past_autograd(world: World, state: State) -> None:
    places = torch.tensor([0, 3, 3])

    def table(w: Any) -> Any:
        return torch.nn.functional.embedding(places, w, max_norm=0.5)

    def program(space: Space) -> None:
        w, own = leaf(space, X, state), X.clone().requires_grad_()
        for one in (w, own):
            (table(one) ** 2).sum().backward()
        torch.testing.assert_close(w.detach().whole(), own.detach())
        assert not torch.equal(own, X)
        torch.testing.assert_close(w.grad.whole(), own.grad)

    world.run(program)


@pytest.mark.parametrize("state", [WHOLE, PARTIAL, chunked(0, 5, 3)], ids=str)
def test_a_leaf_has_its_gradient_in_the_dual_layout(world: World, state: State) -> None:
    def program(space: Space) -> None:
        x = leaf(space, X, state)
        loss(x, W).backward()
        assert x.grad is x.grad
        assert x.grad.spec is x.spec.dual
        torch.testing.assert_close(x.grad.whole(), plain(lambda v: loss(v, W), X)[0])
        x.grad.mul_(2)  # what clips gradients writes into them
        torch.testing.assert_close(x.grad.whole(), 2 * plain(lambda v: loss(v, W), X)[0])
        x.grad = None
        assert x.grad is None
        x.grad = torch.ones_like(X)
        torch.testing.assert_close(x.grad.whole(), torch.ones_like(X))

    world.run(program)


@pytest.mark.parametrize("ask", [torch.autograd.backward, Tensor.backward], ids=["function", "method"])
def test_backward_of_a_loss_that_every_rank_has(world: World, ask: Callable[..., None]) -> None:
    def program(space: Space) -> None:
        x = rows(space)
        y = x.exp().sum()
        y = y * float(1)
        joined = y.redistribute(y.spec.joined)
        ask(joined)
        torch.testing.assert_close(x.grad.whole(), X.exp())

    world.run(program)


def test_several_losses_and_chosen_inputs(world: World) -> None:
    def program(space: Space) -> None:
        x, y = rows(space), rows(space, X * 2)
        torch.autograd.backward([(x * y).sum(), x.sum()], [torch.tensor(2.0, dtype=X.dtype), None], inputs=[x])
        assert y.grad is None
        torch.testing.assert_close(x.grad.whole(), 4 * X + 1)

    world.run(program)


def test_autograd_grad_gives_carriers_for_plain_inputs_too(world: World) -> None:
    def program(space: Space) -> None:
        x, w = rows(space), W.clone().requires_grad_()
        of_x: Any
        of_w: Any
        of_x, of_w = torch.autograd.grad(loss(x, w), [x, w])
        expected = plain(loss, X, W)
        torch.testing.assert_close(of_x.whole(), expected[0])
        torch.testing.assert_close(of_w.whole(), expected[1])

    world.run(program)


def test_gradients_of_gradients(world: World) -> None:
    def penalty(x: Any) -> Any:
        (g,) = torch.autograd.grad((x.tanh() @ W).pow(2).sum(), x, create_graph=True)
        return (g.pow(2).sum(-1).sqrt() - 1).pow(2).mean()

    def program(space: Space) -> None:
        x = rows(space)
        penalty(x).backward()
        torch.testing.assert_close(x.grad.whole(), plain(penalty, X)[0])

    world.run(program)


def test_hooks_see_the_gradient_of_all(world: World) -> None:
    """A hook need not be linear: a sum's parts would each be clipped."""

    def hooked(x: Any, y: Any) -> Any:
        z = x * 1
        z.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return (z * y).sum()

    def program(space: Space) -> None:
        x = leaf(space, W, WHOLE)
        y = rows(space, torch.cat([W, W[:1]]))
        seen: list[Any] = []
        x.register_post_accumulate_grad_hook(seen.append)
        hooked(x, y[:4]).backward()
        torch.testing.assert_close(x.grad.whole(), plain(hooked, W, W)[0])
        assert seen == [x]

    world.run(program)


class Clipped(torch.autograd.Function):
    """A gradient that is clipped: not linear in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        assert type(x) is Tensor, "a function sees what torch gives"
        return (x * y).sum(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return (g * y).clamp(-0.2, 0.2), (g * x).clamp(-0.2, 0.2)


@pytest.mark.parametrize("state", [WHOLE, PARTIAL, chunked(0, 5, 3)], ids=str)
def test_a_function_of_ones_own_has_its_own_backward(world: World, state: State) -> None:
    def f(x: Any, y: Any) -> Any:
        return (Clipped.apply(x * 1, y) ** 2).sum()

    def program(space: Space) -> None:
        x, y = leaf(space, X, state), rows(space, X.flip(0))
        out = f(x, y)
        assert out.requires_grad
        out.backward()
        expected = plain(f, X, X.flip(0))
        torch.testing.assert_close(x.grad.whole(), expected[0])
        torch.testing.assert_close(y.grad.whole(), expected[1])

    world.run(program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_comes_to_the_same_collectives(world: World, reentrant: bool) -> None:
    def block(x: Any, w: Any) -> Any:
        return torch.softmax(x @ w, 0) * torch.tanh(x.mean(0)).sum()

    def program(space: Space) -> None:
        x, w = rows(space), W.clone().requires_grad_()
        checkpoint(block, x, w, use_reentrant=reentrant).pow(2).sum().backward()
        expected = plain(lambda a, b: block(a, b).pow(2).sum(), X, W)
        torch.testing.assert_close(x.grad.whole(), expected[0])
        torch.testing.assert_close(space.all_reduce(w.grad, (0,)), expected[1])

    world.run(program)


def test_transforms_of_torch_func(world: World) -> None:
    def f(x: Any) -> Any:
        return (x.tanh() @ W).pow(2).sum()

    def program(space: Space) -> None:
        x = rows(space)
        torch.testing.assert_close(torch.func.grad(f)(x).whole(), torch.func.grad(f)(X))
        mapped = torch.vmap(lambda row: row.exp() / row.sum())
        out = mapped(x)
        torch.testing.assert_close(out.whole(), mapped(X))
        out.sum().backward()
        torch.testing.assert_close(x.grad.whole(), plain(lambda v: mapped(v).sum(), X)[0])
        value, back = torch.func.vjp(f, x)
        torch.testing.assert_close(back(value * 0 + 1)[0].whole(), torch.func.grad(f)(X))

    world.run(program)


def test_what_torch_cannot_map_over_is_refused(world: World) -> None:
    def program(space: Space) -> None:
        x = rows(space)
        with pytest.raises(CapabilityError, match="is_grads_batched"):
            torch.autograd.grad(x.sum(0), x, torch.eye(4, dtype=X.dtype), is_grads_batched=True)

    world.run(program)


def test_collectives_of_a_step(world: World) -> None:
    """The mean stays a sum's parts until somebody asks: a step sends nothing but the gradients."""

    def program(space: Space) -> int:
        w = W.clone().requires_grad_()
        out = loss(rows(space), w)
        out.backward()
        assert out.spec.states == (PARTIAL,)
        return len(space.gathers)

    with ledger() as traffic:
        assert world.run(program) == [0, 0, 0]
    assert traffic.count() == 0


@pytest.mark.parametrize("name", ["backward", "grad"])
def test_what_others_replace_meanwhile_is_served(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names the function that stands in torch.autograd, so a wrapper of somebody's is what carriers are given."""

    def gradient(out: Any, w: Any) -> Any:
        if name == "backward":
            out.backward()
            return w.grad
        return torch.autograd.grad(out, w)[0]

    def program(space: Space) -> list[torch.Tensor]:
        found = []
        for _ in range(2):  # the second one looks the function up that is known
            w = wrap(W.clone().requires_grad_(), space.whole(W.shape))
            found.append(gradient(loss(rows(space), w), w).whole())
        return found

    wanted = world.run(program)
    original = getattr(torch.autograd, name)
    monkeypatch.setattr(torch.autograd, name, lambda *args, **kwargs: original(*args, **kwargs))
    for alone, behind in zip(wanted, world.run(program), strict=True):
        for a, b in zip(alone, behind, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


# What is replaced in torch ------------------------------------------------------------------------------------------


def test_the_table_is_taken_off_and_put_on_again() -> None:
    entrances.put_on()
    ours = inspect.getattr_static(torch.autograd.Function, "apply")
    entrances.take_off()
    try:
        theirs = inspect.getattr_static(torch.autograd.Function, "apply")
        assert theirs is not ours
        assert torch.vmap is torch.func.vmap
        before = torch.func.grad
        entrances.put_on()
        entrances.put_on()
        assert torch.func.grad is not before
        entrances.take_off()
        assert inspect.getattr_static(torch.autograd.Function, "apply") is theirs
        assert torch.func.grad is before
    finally:
        entrances.put_on()


def test_an_inherited_builtin_is_served_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of torch have `apply` as a builtin without `__func__`."""

    class Owner(dict):  # type: ignore[type-arg]
        pass

    row = entrances.Entrance(Owner, "fromkeys", entrances.of_apply, "", needed=True)
    monkeypatch.setattr(entrances, "table", lambda: (row,))
    monkeypatch.setattr(entrances, "_standing", [])
    entrances.put_on()
    assert "fromkeys" in vars(Owner)
    assert Owner.fromkeys("ab", 1) == {"a": 1, "b": 1}
    entrances.take_off()
    assert "fromkeys" not in vars(Owner)


def test_a_torch_without_an_entrance_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    row = entrances.Entrance(torch.autograd.Function, "gone", entrances.of_apply, "no gradient", needed=True)
    optional = entrances.Entrance(torch.func, "gone", entrances.of_transform, "refused")
    monkeypatch.setattr(entrances, "_standing", [])
    monkeypatch.setattr(entrances, "table", lambda: (optional,))
    entrances.put_on()
    monkeypatch.setattr(entrances, "table", lambda: (row,))
    with pytest.raises(CapabilityError, match=r"Function\.gone"):
        entrances.put_on()


def test_ranks_draw_in_threads_of_their_own(world: World) -> None:
    assert world.run(lambda space: threading.get_ident()) != [threading.get_ident()] * 3
