"""Programs as users write them, in the spirit of keras.io's examples: under a strategy they come to the numbers of one
device, or get an error that says why not. They have no word of unidist in them.

Each program runs in each place, and under each strategy in one of them; ci/test.py --all runs all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.parity.worlds import ALONE, SETTINGS, Setting
from tests.support.comparing import close
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes

PROGRAMS = (
    *("contrastive", "contrastive:run_by_hand", "filtering", "filtering:run_of_the_batch"),
    *("variational", "variational:run_by_hand", "variational:run_half_by_hand", "variational:run_as_a_graph"),
    *("adversarial", "experts", "distillation", "siamese", "translation", "patches", "looping", "transfer"),
)
PLACES = {
    "sim": Setting("sim", "torch", "sim", devices=2),
    "torch": SETTINGS["torch-2"],
    "jax": Setting("jax", "jax", "jax", devices=2),
}
KINDS = ("data", "zero", "found")
# Loops of one's own on JAX give each device the whole batch, and so have nothing to reduce.
UNCUT = {("jax", "data", "looping")}

EVERY = list(product(PLACES, KINDS, PROGRAMS))
# The place of each strategy, in turn; what is trained in a place only under some strategies has its own turn.
_TURNS = (
    {"data": "torch", "zero": "sim", "found": "jax"},
    {"data": "jax", "zero": "torch", "found": "sim"},
    {"data": "sim", "zero": "jax", "found": "torch"},
)
_OWN = {"siamese": 0, "transfer": 0, "adversarial": 0, "looping": 1}
# Variants that differ on torch alone.
_ON_TORCH = (
    *("contrastive", "variational", "variational:run_half_by_hand", "variational:run_as_a_graph"),
    "filtering:run_of_the_batch",
)
FEW = [
    (place, kind, program)
    for k, program in enumerate(PROGRAMS)
    for kind, place in _TURNS[_OWN.get(program, k % 3)].items()
    if place != "jax" or program not in _ON_TORCH
]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, ProcessWorld]]:
    """JAX's process is its own single device too: without a strategy it uses one."""
    found = {place: setting.world() for place, setting in PLACES.items()}
    found["alone"] = ALONE["torch"].world()
    yield found
    for world in found.values():
        world.close(patience=1.0)


@pytest.fixture(scope="module")
def wanted(worlds: dict[str, ProcessWorld]) -> Any:
    """What a program gives on one device of a Keras backend."""
    place = {"sim": "alone", "torch": "alone", "jax": "jax"}
    run = cache(lambda where, program: worlds[where].call("tests.scripts.driver:trained", program, None)[0]["told"])
    return lambda where, program: run(place[where], program)


@pytest.mark.parametrize(("place", "kind", "program"), unless_all(FEW, EVERY))
def test_a_program_tells_what_it_tells_on_one_device(
    place: str, kind: str, program: str, worlds: dict[str, ProcessWorld], wanted: Any
) -> None:
    for found in worlds[place].call("tests.scripts.driver:trained", program, kind):
        close(found["told"], wanted(place, program))
        assert bool(found["ops"]) == ((place, kind, program) not in UNCUT)
