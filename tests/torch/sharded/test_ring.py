"""Attention whose keys go round: numbers, bytes, the keys that a rank has, and what each computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from tests.torch.sharded.lockstep import Case, World, uneven
from unidist import events
from unidist.algebra import Mesh
from unidist.backends import registry
from unidist.backends.torch.sharded import Space, distribute, put_on, ring
from unidist.errors import CapabilityError, ProcessLostError
from unidist.propagation.layouts import WHOLE, Cut, States, chunked
from unidist.testing.processes import ProcessFailedError, ProcessWorld

Tensor = torch.Tensor
attention = F.scaled_dot_product_attention


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


def blind(length: int) -> Tensor:
    """A mask whose first queries see no key."""
    found = torch.ones(length, length, dtype=torch.bool).tril()
    found[: length // 3] = False
    return found


def cases(length: int) -> dict[str, Case]:
    q, k, v = numbers(2, 4, length, 3), numbers(2, 4, length, 3) - 1, numbers(2, 4, length, 5)
    before = torch.ones(length, length, dtype=torch.bool).tril()
    hiding = torch.where(before, 0.0, -2e38).double()
    held = frozenset({3})
    given: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], frozenset[int]]] = {
        "plain": (attention, (q, k, v), frozenset()),
        "causal": (causal, (q, k, v), frozenset()),
        "grouped": (grouped, (q, k[:, :2], v[:, :2]), frozenset()),
        "other keys": (attention, (q, k[:, :, :5], v[:, :, :5]), frozenset()),
        "with a bias": (attention, (q, k, v, numbers(2, 1, length, length)), frozenset()),
        "with a bias of keys": (attention, (q, k, v, numbers(2, 1, 1, length)), frozenset()),
        "hiding": (attention, (q, k, v, hiding), held),
        # Where a query sees nothing, all keys count as much.
        "hiding all": (attention, (q, k, v, torch.where(blind(length), 0.0, -2e38).double()), held),
        "true or false": (attention, (q, k, v, blind(length)), held),
    }
    return {name: Case(name, *one) for name, one in given.items()}


def layouts(case: Case, ranks: int) -> list[tuple[States, ...]]:
    """Places cut evenly and not; of keys alone; of the mask along both."""
    even = [(chunked(2, x.shape[2], ranks),) for x in case.inputs[:3]]
    mask = [(WHOLE,)] * len(case.inputs[3:])
    other = [(Cut(2, tuple(uneven(x.shape[2], ranks))),) for x in case.inputs[:3]]
    found = [(*even, *mask), (*other, *mask), ((WHOLE,), *even[1:], *mask), ((WHOLE,), (WHOLE,), even[2], *mask)]
    for one in case.inputs[3:]:
        dims = (dim for dim in (one.ndim - 2, one.ndim - 1) if one.shape[dim] > 1)
        found += [(*even, (chunked(dim, one.shape[dim], ranks),)) for dim in dims]
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_one_devices_attention(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SCORES", 1 << 6)  # queries some at a time
    world, failures = World(1, "ring", model=ranks), []
    for length in unless_all((4 * ranks, 7), (4 * ranks, 7, ranks)):
        for case in cases(length).values():
            for layout in layouts(case, ranks):
                sent: list[str] = []
                with events.listen(lambda event, sent=sent: sent.append(event.op)):
                    failures.append(world.fails(case, layout))
                assert "permute" in sent, f"{case.name}: nothing went round"
    assert not (found := list(filter(None, failures))), "\n".join(found[:20])


class Largest(TorchDispatchMode):
    """Notes the most places along the last dim but one that anything made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.places = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = (x for x in tree_leaves(out) if isinstance(x, Tensor) and x.ndim == 4)
        self.places = max([self.places, *(max(x.shape[2:]) for x in made)])
        return out


def rounds(ranks: int, function: Callable[..., Any], *inputs: Tensor) -> tuple[list[events.Event], list[int]]:
    """What the first rank sends for attention of cut places and its gradients, and the most places that each has."""
    world, sent = World(1, "ring", model=ranks), []

    def program(space: Space) -> int:
        cut = [space.spec((chunked(2, x.shape[2], ranks),), tuple(x.shape)) for x in inputs]
        given = [distribute(x, spec) for x, spec in zip(inputs, cut, strict=True)]
        for x in given:
            x.requires_grad_()
        with Largest() as largest:
            out: Any = function(*given)
            out.local.sum().backward()
        return largest.places

    with events.listen(sent.append):
        found = world.run(program)
    return [event for event in sent if event.op == "permute"], found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_and_keys(ranks: int) -> None:
    """Keys and values go round twice and their gradients once: 6 u k (n - 1), of k heads of u bytes each."""
    heads, length, width = 4, 16, 8
    q, k, v = (numbers(2, n, length, width) for n in (heads, 2, 2))
    u = 2 * length * width * 8 // ranks
    sent, places = rounds(ranks, lambda q, k, v: attention(q, k, v, enable_gqa=True), q, k, v)
    assert sum(event.bytes for event in sent) == 6 * u * 2 * (ranks - 1)
    assert max(places) == max(length // ranks, 2 * width)  # keys and values travel side by side
    # Dealt out and given back: q and k heads each way, and a number of each query.
    sent, places = rounds(ranks, grouped, q, k, v)
    numbers_of_queries = u * heads // width
    assert sum(event.bytes for event in sent) == 6 * u * 2 * (ranks - 1) + 4 * u * (heads + 2) + numbers_of_queries
    assert max(places) == max(length // ranks, 2 * width)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_under_a_causal_mask_all_compute_alike(ranks: int) -> None:
    length = 4 * ranks

    def scores(space: Space) -> list[int]:
        one = ring.Ring(space, (4,) * ranks, (4,) * ranks, True, 1.0)
        found = []
        for step in range(ranks):
            blocks = one.blocks(step, torch.empty(1, 1, 4, 1))
            found.append(sum((b.rows.stop - b.rows.start) * (b.columns.stop - b.columns.start) for b in blocks))
        return found

    each = World(1, "ring", model=ranks).run(scores)
    assert each == [each[0]] * ranks
    # Three of the four pairs of chunks at first, two at each other step: half of all.
    assert each[0] == [12, *[8] * (ranks - 1)]
    assert sum(map(sum, each)) < 0.6 * length**2 + 4 * length


def test_keys_that_a_mask_hides_are_not_computed() -> None:
    """The first of four ranks needs its own keys alone, the last one those of all."""
    length, ranks = 16, 4
    case = cases(length)["hiding"]
    q, k, v, mask = case.inputs
    computed: dict[int, int] = {}
    scores = ring._scores

    def counted(one: ring.Ring, *args: Any) -> Tensor:
        computed[one.place] = computed.get(one.place, 0) + 1
        return scores(one, *args)

    with mock.patch.object(ring, "_scores", counted):
        rounds(ranks, lambda q, k, v: attention(q, k, v, mask), q, k, v)
    assert computed == {place: 2 * (place + 1) for place in range(ranks)}  # forward and backward


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: attention(q, k, v, dropout_p=0.5), r"dropout_p=0.5 drops weights .* Set dropout=0"),
        (lambda q, k, v: attention(q, k, v, torch.ones(8, 8), is_causal=True), "a mask and is_causal=True"),
        (lambda q, k, v: attention(q, k[:1], v[:1]), "have not the same rows"),
        (lambda q, k, v: attention(q, k[:, :3], v[:, :3], enable_gqa=True), "4 heads of queries do not divide among 3"),
        (lambda q, k, v: q @ k.mT, "a product of tensors whose places are cut along different dims"),
        (lambda q, k, v: torch.einsum("bhqd,bhkd->bhqk", q, k), "attention='ulysses' or 'gather'"),
    ],
)
def test_what_would_gather_is_refused(call: Callable[..., Any], words: str) -> None:
    x = numbers(2, 4, 8, 4)
    with pytest.raises(CapabilityError, match=rf"attention='ring': .*{words}|{words}"):
        rounds(2, call, x, x, x)


# a process that is lost -----------------------------------------------------------------------------------------------


def join(seconds: float) -> None:
    unidist.use("torch")
    unidist.initialize(timeout=seconds)


def lose() -> tuple[str, str]:
    """Process 1 ends in the middle of the gradients' round."""
    backend: Any = registry.current()
    space = Space.of(backend, Mesh({"x": 3}), (("x",),), invariant=True)
    space.turns = "ring"
    put_on()
    spec = space.spec((chunked(2, 9, 3),), (1, 1, 9, 2))
    given = [distribute(numbers(1, 1, 9, 2), spec) for _ in range(3)]
    for x in given:
        x.requires_grad_()
    out: Any = attention(*given)
    passed, count = ring.Ring.passed, 0

    def passing(self: ring.Ring, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if backend.rank == 1 and count == 2:
            os._exit(9)
        return passed(self, x)

    with mock.patch.object(ring.Ring, "passed", passing), pytest.raises(ProcessLostError) as caught:
        out.local.sum().backward()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.processes
def test_a_process_that_is_lost_is_told_on_all_others() -> None:
    with ProcessWorld(3, setup=join, setup_args=(60.0,), preload=preloaded.TORCH) as world:
        outcomes = world.outcomes(lose)
    assert isinstance(outcomes[1].failure, ProcessFailedError)
    for place in (0, 2):
        assert outcomes[place].failure is None, outcomes[place].failure
        assert outcomes[place].value[1].startswith("permute over ranks [0, 1, 2]")
