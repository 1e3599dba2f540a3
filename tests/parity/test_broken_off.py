"""A backward that raises counts for nothing, and the steps after it are those of a training without it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.worlds import Worlds

pytestmark = pytest.mark.processes

RUN = "tests.parity.broken_off:train"
WHERE = ("backward", "waiting")


def assert_nothing_came_of_it(worlds: Worlds, setting: str, zero: int, where: str, by_hand: bool = False) -> None:
    world = worlds.get(setting)
    wanted = world.call(RUN, zero, None, by_hand)
    for (found, launched), (undisturbed, _) in zip(world.call(RUN, zero, where, by_hand), wanted, strict=True):
        assert launched > 1
        for path, shards in undisturbed.items():
            for one, other in zip(found[path], shards, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=path)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("setting", ["torch-2", "sim-torch"])
def test_a_training_goes_on_behind_a_backward_that_raised(setting: str, zero: int, where: str, worlds: Worlds) -> None:
    assert_nothing_came_of_it(worlds, setting, zero, where)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("zero", [0, 2])
def test_a_loop_of_ones_own_does_so_too(zero: int, where: str, worlds: Worlds) -> None:
    assert_nothing_came_of_it(worlds, "torch-2", zero, where, by_hand=True)
