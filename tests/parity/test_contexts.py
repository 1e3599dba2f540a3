"""With an axis of contexts a language model trains as on one device: masks, positions, windows, biases, dropout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import pairwise

pytestmark = pytest.mark.processes

# Cut unevenly, and evenly.
LENGTHS = (7, 8)
BATCH = 4
RUN = "tests.keras.contexts:trained"
AS_PROGRAMS = "tests.keras.torch.promised:run"
TWO, FOUR = {"context": 2}, {"context": 4}
GRIDS = ({"data": 2, "context": 2}, {"context": 2, "model": 2})
MESHES = {"sim-torch": (FOUR, *GRIDS), "torch-2": (TWO,), "torch-4": (FOUR, *GRIDS), "horovod-2": (TWO,)}
PLACES = [
    (setting, str(mesh), zero if "data" in mesh else 0, length, attention)
    for setting, meshes in MESHES.items()
    for mesh in meshes
    for zero in (0, 1, 3)
    for length in LENGTHS
    for attention in ("auto", "ulysses", "gather")
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return cache(lambda length, *args: alone.world("torch").call(RUN, None, 0, length, *args)[0])


@pytest.mark.parametrize(("setting", "mesh", "zero", "length", "attention"), pairwise(dict.fromkeys(PLACES)))
def test_it_trains_as_one_device(
    setting: str, mesh: str, zero: int, length: int, attention: str, expected: Any, worlds: Worlds
) -> None:
    sizes: dict[str, int] = eval(mesh)
    for found in worlds.get(setting).call(RUN, sizes, zero, length, attention):
        same(found, expected(length))
        assert found["_sent"]["all_reduce"], "sums of weights' gradients"
        # Gathered keys and values send as much over 2 devices, and "auto" gathers then.
        assert found["_sent"]["all_to_all" if attention == "ulysses" else "all_gather"]


def test_programs(expected: Any, worlds: Worlds) -> None:
    """Of full batches: a ragged one would be traced once more, for as long."""
    how = LENGTHS[0], "ulysses", BATCH
    for found in worlds.get("torch-2").call(AS_PROGRAMS, RUN, TWO, 0, *how):
        same(found, expected(*how))
        assert found["_unfit"] == []
        assert found["_sent"]["all_to_all"]


@pytest.mark.parametrize("setting", ["sim-jax", "sim-tensorflow"])
def test_other_frameworks_refuse(setting: str, worlds: Worlds) -> None:
    with pytest.raises(Exception, match=r"CapabilityError: an axis of contexts \('context',\): with Keras on"):
        worlds.get(setting).call("tests.keras.contexts:made", {"context": 4})
