"""What a carrier is to the code that uses it: the whole."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.torch.sharded.lockstep import World, whole
from unidist.backends.torch.sharded import Space, distribute, from_local, space
from unidist.errors import CapabilityError, LayoutError
from unidist.ledger import ledger
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, State, chunked

Tensor = torch.Tensor
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STATES: list[State] = [WHOLE, PARTIAL, chunked(0, 5, 3), chunked(1, 4, 3), Cut(0, (0, 4, 1))]


@pytest.fixture(scope="module")
def world() -> World:
    return World(data=3)


def carrier(space: Space, state: State = STATES[2], x: Tensor = X) -> Any:
    return distribute(x, space.spec((state,), x.shape))


@pytest.mark.parametrize("state", STATES, ids=str)
def test_it_says_of_itself_what_the_whole_would(world: World, state: State) -> None:
    def program(space: Space) -> None:
        x = carrier(space, state)
        assert issubclass(type(x), Tensor)
        assert (x.shape, x.dtype, x.device, x.ndim) == (X.shape, X.dtype, X.device, 2)
        assert (x.size(), x.size(0), x.dim(), x.numel(), len(x), x.nbytes) == (X.shape, 5, 2, 20, 5, X.nbytes)
        assert (x.stride(), x.stride(1), x.is_contiguous(), x.element_size()) == ((4, 1), 1, True, 8)
        assert x.t().stride() == X.t().stride()
        assert (x.is_floating_point(), x.is_cuda, x.is_sparse, x.layout) == (True, False, False, torch.strided)
        assert (x.requires_grad, x.is_leaf, x.grad, x.grad_fn) == (False, True, None, None)
        assert x.local.shape == x.spec.local

    world.run(program)


@pytest.mark.parametrize("name", ["sum", "mean", "std", "amax", "softmax", "count_nonzero", "unsqueeze", "select"])
@pytest.mark.parametrize("state", STATES[1:4], ids=str)
def test_a_dim_that_is_not_there_is_said_so(world: World, state: State, name: str) -> None:
    said = (5, 0) if name == "select" else (5,)
    with pytest.raises(IndexError, match="Dimension out of range"):
        world.run(lambda space: getattr(torch, name)(carrier(space, state), *said))


@pytest.mark.parametrize("state", STATES, ids=str)
def test_values_that_are_asked_for_are_the_whole(world: World, state: State) -> None:
    def program(space: Space) -> None:
        x = carrier(space, state)
        np.testing.assert_array_equal(x.numpy(), X.numpy())
        np.testing.assert_array_equal(np.asarray(x), X.numpy())
        assert x.tolist() == X.tolist()
        assert float(x.sum()) == pytest.approx(float(X.sum()))
        assert f"{x.sum():.3f}" == f"{X.sum():.3f}"
        assert int(x.argmax()) == int(X.argmax())
        assert bool((x > -9).all())
        assert [float(row.sum()) for row in x] == pytest.approx([float(row.sum()) for row in X])
        assert torch.equal(x, X)
        assert float(X[1, 2]) in x
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(x)

    world.run(program)


def test_printing_waits_for_nobody(world: World) -> None:
    """What one rank alone prints or raises must not wait for the others."""

    def program(space: Space) -> str:
        return repr(carrier(space)) if space.rank == 1 else ""

    with ledger() as traffic:
        said = world.run(program)[1]
    assert "shape=(5, 4)" in said
    assert "data: S(0, 2+2+1)" in said
    assert traffic.count() == 0


def test_what_it_needs_is_remembered_until_it_is_written_to(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space, PARTIAL)
        y = x * 2
        assert y.spec.partial
        y.exp()
        y.sigmoid()
        assert not (y + 1).spec.partial, "a sum that was joined stays so"
        y.add_(1)
        torch.testing.assert_close(y.exp().whole(), (X * 2 + 1).exp())

    with ledger() as traffic:
        world.run(program)
    assert traffic.count("all_reduce") == 2  # before the write, and after it


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_gathered_of_a_variable_is_not_kept(world: World, invariant: bool) -> None:
    def program(space: Space) -> None:
        space = Space.of(world.backend, space.mesh, invariant=invariant)
        for frugal in (False, True):
            space.frugal = frugal
            x = carrier(space)
            whole = weakref.ref(x.whole())
            assert (whole() is None) == frugal
            total = (x * x).sum()
            assert float(total) == float(total)  # numbers are

    with ledger() as traffic:
        world.run(program)
    assert traffic.count("all_reduce") == 2


def test_writes_are_seen_by_views(world: World) -> None:
    def program(space: Space) -> None:
        for state in STATES:
            x, plain = carrier(space, state) * 1, X.clone()
            view, of_plain = x.transpose(0, 1), plain.transpose(0, 1)
            x.add_(torch.ones(5, 4, dtype=X.dtype))
            x[:, 1] = 3.0
            plain.add_(1)
            plain[:, 1] = 3.0
            torch.testing.assert_close(view.whole(), of_plain)
            view.mul_(2)
            torch.testing.assert_close(x.whole(), plain * 2)

    world.run(program)


TAKEN = {
    "slice": lambda x: x[1:3],
    "diagonal": torch.diagonal,
    "view of a view": lambda x: x.view(-1)[3:7],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "turned": lambda x: x[1:3].t(),
    "row": lambda x: x[0],
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("state", STATES, ids=str)
def test_what_is_written_into_a_view_is_written_into_the_tensor(
    world: World, state: State, name: str, invariant: bool
) -> None:
    """Also where the layout made the view a copy; views of one copy know of each other."""
    wanted, take = X.clone(), TAKEN[name]
    view = take(wanted)
    view.mul_(2)
    view[0] = -1.0

    def program(space: Space) -> None:
        if invariant:
            space = Space.of(world.backend, space.mesh, invariant=True)
        x = carrier(space, state) * 1
        x.exp()  # somebody has joined a sum
        view = take(x)
        view.mul_(2)
        view[0] = -1.0
        torch.testing.assert_close(whole(x * 1), wanted)
        torch.testing.assert_close(whole(view + 0), take(wanted))

    world.run(program)


def test_what_is_written_into_a_copy_of_a_copy_is_written_into_the_tensor() -> None:
    wanted = X.clone()
    wanted.view(-1)[:7].mul_(2)

    def program(space: Space) -> None:
        x: Any = distribute(X, space.spec((chunked(0, 5, 2), chunked(1, 4, 2)), X.shape)) * 1
        taken = x.view(-1)[:7]
        taken.mul_(2)
        torch.testing.assert_close(x.whole(), wanted)
        x.add_(1)
        with pytest.raises(CapabilityError, match="take it after the write"):
            taken.sum()

    World(a=2, b=2).run(program)


def test_a_copy_where_torch_gives_a_view_is_not_stale(world: World) -> None:
    def program(space: Space) -> None:
        partial = carrier(space, PARTIAL) * 1
        partial.exp()
        view = partial.t()  # of the sum that was joined
        partial.add_(1)
        for use in (view.sum, lambda: view.add_(1)):
            with pytest.raises(CapabilityError, match="take it after the write"):
                use()
        torch.testing.assert_close(partial.t().whole(), X.t() + 1)
        x = carrier(space) * 1
        taken = x[1:3]
        taken.sum()
        x.add_(1)
        with pytest.raises(CapabilityError, match="take it after the write"):
            taken.sum()
        x[1:3] = x[1:3] + 1
        assert float(x[1, 0]) == pytest.approx(float(X[1, 0]) + 2)

    world.run(program)


def test_a_copy_of_what_has_a_gradient_is_not_written_to(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space).requires_grad_(True) * 1
        with pytest.raises(CapabilityError, match="write into the tensor"):
            x[1:3].add_(1)

    world.run(program)


def test_results_that_are_given_are_written_into(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space)
        out: Any = carrier(space, chunked(1, 4, 3)) * 0
        found: Any = torch.exp(x, out=out)
        assert found is out
        torch.testing.assert_close(out.whole(), X.exp())
        plain = torch.zeros_like(X)
        torch.exp(x, out=plain)
        torch.testing.assert_close(plain, X.exp())
        with pytest.raises(CapabilityError, match="other memory"):
            torch.sum(x, 0, out=out)

    world.run(program)


def test_plain_tensors_take_carriers_in_place(world: World) -> None:
    def program(space: Space) -> None:
        plain = torch.zeros(5, 4, dtype=X.dtype)
        plain.add_(carrier(space))
        plain[0] = carrier(space)[1]
        expected = X.clone()
        expected[0] = X[1]
        torch.testing.assert_close(plain, expected)

    world.run(program)


def test_copies_and_files(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space)
        again = copy.deepcopy(x)
        again.add_(1)
        assert again.spec is x.spec
        torch.testing.assert_close(x.whole(), X)
        file = io.BytesIO()
        torch.save(x.whole(), file)
        file.seek(0)
        torch.testing.assert_close(torch.load(file), X)
        parameter: Any = torch.nn.Parameter(x)
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad
        parameter.sum().backward()
        torch.testing.assert_close(parameter.grad.whole(), torch.ones_like(X))
        x.data.add_(1)
        torch.testing.assert_close(x.whole(), X + 1)
        x.data = again
        torch.testing.assert_close(x.whole(), X + 1)

    world.run(program)


def test_dtypes_of_sums(world: World) -> None:
    """A sum is rounded once, after it is joined."""

    def program(space: Space) -> None:
        x = from_local(torch.full((1,), 1.0 + 2**-9, dtype=torch.float64), space.spec((PARTIAL,), (1,)))
        assert x.to(torch.float64).spec.partial
        assert not x.float().spec.partial
        assert float(x.to(torch.bfloat16)) == float(torch.tensor(3 * (1.0 + 2**-9)).bfloat16())
        assert float(x.long()) == 3

    world.run(program)


def test_random_numbers_agree_where_values_do(world: World) -> None:
    def program(space: Space) -> tuple[Any, ...]:
        torch.manual_seed(7)
        whole, cut = carrier(space, WHOLE, torch.ones(6, 4)), carrier(space, chunked(0, 6, 3), torch.ones(6, 4))
        partial = carrier(space, PARTIAL, torch.ones(6, 4))
        noise: Any = torch.rand_like(cut)
        dropped: Any = torch.nn.functional.dropout(partial, 0.5)
        assert not dropped.spec.partial
        filled = cut.clone().normal_()
        alike: list[Any] = [
            torch.rand_like(whole),
            torch.nn.functional.dropout(whole, 0.5),
            dropped,
            whole.clone().uniform_(),
            torch.nn.functional.dropout2d(whole.view(2, 3, 2, 2), 0.5),
            torch.bernoulli(whole * 0.5, generator=torch.Generator().manual_seed(3)),
        ]
        return (
            *(one.local for one in alike),
            noise.local,
            filled.local,
        )

    first, second, third = world.run(program)
    for one, other, last in zip(first[:-2], second[:-2], third[:-2], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, last)
    for one, other in zip(first[-2:], second[-2:], strict=True):
        assert not torch.equal(one, other), "parts of one draw"


def test_what_does_not_fit_is_refused(world: World) -> None:
    def program(space: Space) -> None:
        with pytest.raises(LayoutError, match="gave a part of shape"):
            from_local(torch.zeros(7, 4), space.spec((chunked(0, 5, 3),), (5, 4)))
        with pytest.raises(LayoutError, match="does not cut"):
            space.spec((Cut(0, (5,)),), (5, 4))
        with pytest.raises(RuntimeError):
            carrier(space).reshape(7, 3)

    world.run(program)


def test_tensors_of_two_spaces_do_not_meet(world: World) -> None:
    def program(here: Space) -> None:
        other = space(world.backend, world.mesh)
        with pytest.raises(LayoutError, match="several spaces"):
            carrier(here) + carrier(other)

    world.run(program)


def test_a_plan_is_of_its_static_arguments(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space)
        for less in (0.5, 0.75, 0, 1):
            spread: Any = torch.var(x, 0, correction=less)
            torch.testing.assert_close(spread.whole(), torch.var(X, 0, correction=less))
        for n in (1, 1.0, True, 2, 0, 0.0):
            out: Any = x.long() + n
            torch.testing.assert_close(out.whole(), X.long() + n)

    world.run(program)


def test_gathers_are_counted_by_name_and_told_to_the_ledger(world: World) -> None:
    def program(space: Space) -> Any:
        x = carrier(space)
        torch.linalg.svdvals(x)
        (x + x).sum(-1)
        return space.gathers

    with ledger() as traffic:
        gathers = world.run(program)[0]
    assert gathers == {"linalg_svdvals": 1}
    assert [row[2] for row in traffic.rows()] == ["no rule for linalg_svdvals"]
    assert traffic.bytes("all_gather") == round(20 * 8 * 2 / 3, 9) or traffic.count("all_gather") == 1


def test_norms_pads_and_scatters_of_uncut_dims_gather_nothing(world: World) -> None:
    """Of norms of rows the parts of sums are joined, and no rows."""

    def program(space: Space) -> Any:
        x = carrier(space)
        index = torch.zeros_like(x, dtype=torch.int64)
        for p in (1, 2, 3, 0):
            torch.linalg.vector_norm(x, p).whole()
        torch.linalg.vector_norm(x, float("inf")).whole()
        torch.linalg.norm(x, dim=0), torch.norm(x), x.norm(dim=1), torch.linalg.matrix_norm(x)
        F.pad(x, (1, 2), value=3.0), F.pad(x[:, None], (1, 1), mode="reflect")
        x.scatter_reduce(1, index, x, "amax"), torch.cumprod(x, 1), x.repeat_interleave(2, 1)
        return space.gathers

    with ledger() as traffic:
        gathers = world.run(program)[0]
    assert not gathers
    assert {event.op for event in traffic.events} == {"all_reduce", "all_gather"}
    assert max(event.bytes for event in traffic.events) < 4 * 8 * 2  # less than two numbers a column


@pytest.mark.parametrize("how", ["sum", "prod", "mean", "amax", "amin"])
def test_what_is_scattered_is_of_sums_and_not_of_their_parts(world: World, how: str) -> None:
    index = torch.tensor([[0, 3]] * 5)

    def program(space: Space) -> None:
        x: Any = from_local(X * (2.0, -3.0, 2.0)[space.rank], space.spec((PARTIAL,), X.shape))
        torch.testing.assert_close(x.scatter_reduce(1, index, x, how).whole(), X.scatter_reduce(1, index, X, how))

    world.run(program)


def test_numbers_in_a_list_become_a_tensor(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space)
        torch.testing.assert_close(torch.tensor([x.sum(), x[0, 1]]), torch.stack([X.sum(), X[0, 1]]))
        torch.testing.assert_close(torch.as_tensor([[x.mean(), 1.0]]), torch.tensor([[X.mean(), 1.0]], dtype=X.dtype))

    world.run(program)


def test_more_layouts_of_the_same_value(world: World) -> None:
    def program(space: Space) -> None:
        x = carrier(space)
        for state in STATES:
            y = x.redistribute(space.spec((state,), x.shape))
            y.add_(1)
            torch.testing.assert_close(y.whole(), X + 1)
        torch.testing.assert_close(x.whole(), X)

    world.run(program)
