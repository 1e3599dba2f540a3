"""PyTorch's own operator database: each operation on carriers equals the plain call, value and gradient."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import pytest

from tests.support.sampling import SEED, WHOLE, unless_all
from tests.torch.sharded import operators
from tests.torch.sharded.lockstep import Case, World, on_two_axes, one_at_a_time

SHARES = 8
SAMPLES = unless_all(1, 12)
# What a sum becomes that is not real, and what is whole though its operand is a sum.
ALWAYS = ("cdouble", "zeros_like")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """A part of the operations, drawn by the seed; all of them with --all."""
    names = operators.names()
    wanted = set(unless_all([*ALWAYS, *random.Random(SEED).sample(names, len(names) // SHARES)], names))
    skipped: Counter[str] = Counter()
    found = list(operators.cases(wanted, SAMPLES, skipped))
    print(f"{len(found)} samples of {len({case.name for case in found})} operations of {len(names)}; {dict(skipped)}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("axes", "invariant"),
    [({"data": 2}, 0), ({"data": 3}, 0), ({"data": 2, "model": 2}, 0), ({"model": 2}, 1), ({"data": 2, "model": 2}, 1)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_operators_on_carriers_equal_the_plain_call(axes: dict[str, int], invariant: int, cases: list[Case]) -> None:
    world = World(invariant, **axes)
    draw = random.Random(SEED)
    failures, count = [], 0
    gathered: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            if len(axes) > 1:
                layouts = list(on_two_axes(case.inputs, (2, 2), unless_all(2, 8), draw))
            else:
                layouts = list(dict.fromkeys(one_at_a_time(case.inputs, world.mesh.size)))
            world.gathers.clear()
            failures += [failure for one in layouts if (failure := world.fails(case, one))]
            count += len(layouts)
            if world.gathers:
                gathered.add(case.name)
    names = {case.name for case in cases}
    print(f"{count} cases on {axes}: {len(names - gathered)} operations by rules, {len(gathered)} gather")
    assert not failures, "\n".join(failures[:40])
    assert world.results["S"] or len(axes) > 1
    assert len(gathered) < len(names)
    assert WHOLE or len(names) > 60
