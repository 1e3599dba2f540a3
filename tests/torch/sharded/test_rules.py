"""Each rule by chunking: whole inputs are cut by every layout, the results joined by theirs, and compared with the
function on the whole, values and gradients."""

from __future__ import annotations

import random

import pytest

from tests.support.sampling import SEED, unless_all
from tests.torch.sharded.cases import FUNCTIONS, case
from tests.torch.sharded.lockstep import World, every, on_two_axes, uneven
from unidist import events


@pytest.fixture(scope="module")
def worlds() -> dict[int, World]:
    return {n: World(data=n) for n in (1, 2, 3)}


@pytest.fixture(scope="module")
def square() -> World:
    return World(data=2, model=2)


@pytest.mark.parametrize("family", FUNCTIONS)
def test_every_layout_of_every_input(family: str, worlds: dict[int, World]) -> None:
    failures, kinds = [], set()
    draw = random.Random(SEED)
    for key in FUNCTIONS[family]:
        one = case(family, key)
        for n, world in worlds.items():
            layouts = list(every(one.inputs, n, uneven if n > 1 else None))
            few = unless_all(min(len(layouts), {1: 2, 2: 14, 3: 10}[n]), len(layouts))
            world.results.clear()
            found = [world.fails(one, layout) for layout in draw.sample(layouts, few)]
            failures += [failure for failure in found if failure]
            if n > 1:
                kinds |= set(world.results)
    assert not failures, "\n".join(failures[:20])
    assert "S" in kinds, "nothing stayed cut"


@pytest.mark.parametrize("family", FUNCTIONS)
def test_two_axes(family: str, square: World) -> None:
    draw = random.Random(SEED)
    failures = []
    for key in FUNCTIONS[family]:
        one = case(family, key)
        for layouts in on_two_axes(one.inputs, (2, 2), unless_all(3, 60), draw):
            failures.append(square.fails(one, layouts))
    assert not any(failures), "\n".join([failure for failure in failures if failure][:20])


@pytest.mark.parametrize("turns", ["less", "always"])
@pytest.mark.parametrize("family", ["contraction", "attention", "elementwise"])
def test_products_turn_what_is_cut(family: str, turns: str) -> None:
    """And masks are gathered before they are spread."""
    failures, ops = [], set()
    draw = random.Random(SEED)
    for n in (2, 3):
        world = World(1, turns, model=n)
        for key in FUNCTIONS[family]:
            one = case(family, key)
            layouts = list(every(one.inputs, n, uneven))
            for layout in draw.sample(layouts, unless_all(min(len(layouts), 10), len(layouts))):
                with events.listen(lambda event: ops.add(event.op)):
                    failures.append(world.fails(one, layout))
    assert not (found := list(filter(None, failures))), "\n".join(found[:20])
    assert "all_to_all" in ops or family == "elementwise"
