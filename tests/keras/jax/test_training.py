"""Training on several devices and processes gives the numbers of one device. Made for Keras 3.15."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.comparing import same
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

PROGRAMS = "tests.keras.jax.programs"
MODELS = ("mlp", "conv", "lstm", "two_outputs", "subclassed")
OPTIMIZERS = ("momentum", "adam")
# Every combination would compile for minutes; tests/parity has more of them.
PAIRS = [(name, OPTIMIZERS[k % 2]) for k, name in enumerate(MODELS)]


@pytest.fixture(scope="module")
def expected(one: ProcessWorld) -> Any:
    return cache(lambda name, optimizer: one.call(f"{PROGRAMS}:train", name, optimizer, None)[0])


EVERY = [(*pair, kind) for pair in PAIRS for kind in ("dp", "mp", "2x2")]
ON_FOUR = unless_all([(*pair, ("dp", "2x2")[k % 2]) for k, pair in enumerate(PAIRS)], EVERY)
IN_TWO = [(name, optimizer, kind) for name, optimizer in PAIRS for kind in ("dp", "2x2", "2x2 across")]


@pytest.mark.parametrize(("name", "optimizer", "kind"), ON_FOUR)
def test_four_devices_train_as_one(four: ProcessWorld, expected: Any, name: str, optimizer: str, kind: str) -> None:
    found = four.call(f"{PROGRAMS}:train", name, optimizer, kind)[0]
    same(found, expected(name, optimizer))
    assert found["spread"] == 4
    assert bool(found["sharded"]) == (kind != "dp")


@pytest.mark.processes
# Two processes compile what one does.
@pytest.mark.parametrize(("name", "optimizer", "kind"), unless_all([IN_TWO[k] for k in (0, 5)], IN_TWO))
def test_two_processes_of_two_devices_train_as_one(
    pair: ProcessWorld, expected: Any, name: str, optimizer: str, kind: str
) -> None:
    for found in pair.call(f"{PROGRAMS}:train", name, optimizer, kind):
        same(found, expected(name, optimizer))
        assert found["spread"] == 4
        assert bool(found["sharded"]) == (kind != "dp")
