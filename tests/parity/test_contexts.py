"""With an axis of contexts a language model trains as on one device: masks, positions, windows, biases, dropout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import each_value, unless_all

pytestmark = pytest.mark.processes

# Cut unevenly, and evenly.
LENGTHS = (7, 8)
# (rows of a batch, of all): those divide over two devices, and these do not.
BATCHES = ((4, 8), (5, 6))
RUN, MADE = "tests.keras.contexts:trained", "tests.keras.contexts:made"
AS_PROGRAMS = "tests.keras.torch.promised:run"
TWO, FOUR = {"context": 2}, {"context": 4}
GRIDS = ({"data": 2, "context": 2}, {"context": 2, "model": 2})
MESHES = {"sim-torch": (FOUR, *GRIDS), "torch-2": (TWO,), "torch-4": GRIDS, "horovod-2": (TWO,)}
PLACES = [
    (setting, str(mesh), zero if "data" in mesh else 0, length, attention)
    for setting, meshes in MESHES.items()
    for mesh in meshes
    for zero in (0, 1, 3)
    for length in LENGTHS
    for attention in ("auto", "ulysses", "gather")
]


# With Keras on JAX the compiler cuts. Where "context" is first its parts are on two processes.
ACROSS = {"context": 2, "data": 2}
MESHES_OF_JAX = {"sim-jax": (FOUR, *GRIDS), "jax-4": (FOUR, *GRIDS), "jax-2x2": (FOUR, *GRIDS, ACROSS)}
EVERY_OF_JAX = [
    (setting, str(mesh), zero, batch, rows)
    for setting, meshes in MESHES_OF_JAX.items()
    for mesh in meshes
    for zero in ((0, 1, 3) if "data" in mesh else (0,))
    for batch, rows in (BATCHES if "data" in mesh else BATCHES[:1])
]
# XLA compiles each for seconds.
FEW_OF_JAX = [
    ("sim-jax", str(FOUR), 0, *BATCHES[0]),
    ("sim-jax", str(GRIDS[1]), 0, *BATCHES[0]),
    ("jax-4", str(GRIDS[0]), 1, *BATCHES[1]),
    ("jax-2x2", str(ACROSS), 3, *BATCHES[0]),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda length, *args: alone.run("torch", RUN, None, 0, length, *args)


@pytest.fixture(scope="module")
def of_jax(alone: Alone) -> Any:
    return lambda *sizes: alone.run("jax", RUN, None, 0, LENGTHS[1], "auto", *sizes)


# Each mesh where it can be, at each stage, and each way with parts that are even and uneven.
SAMPLE = each_value(
    dict.fromkeys(PLACES), lambda row: (row[:2], row[1:3], row[3:]), cost=lambda row: SETTINGS[row[0]].processes
)


@pytest.mark.parametrize(("setting", "mesh", "zero", "length", "attention"), SAMPLE)
def test_it_trains_as_one_device(
    setting: str, mesh: str, zero: int, length: int, attention: str, expected: Any, worlds: Worlds
) -> None:
    sizes: dict[str, int] = eval(mesh)
    for found in worlds.get(setting).call(RUN, sizes, zero, length, attention):
        same(found, expected(length))
        assert found["_sent"]["all_reduce"], "sums of weights' gradients"
        # Gathered keys and values send as much over 2 devices, and "auto" gathers then.
        assert found["_sent"]["all_to_all" if attention == "ulysses" else "all_gather"]


# 16 places are dealt to 2 or 4 devices by the first and the last chunk; 7 are not.
AROUND = [(setting, str(mesh), length) for setting, meshes in MESHES.items() for mesh in meshes for length in (7, 16)]


@pytest.mark.parametrize(("setting", "mesh", "length"), each_value(AROUND))
def test_keys_go_round(setting: str, mesh: str, length: int, alone: Alone, worlds: Worlds) -> None:
    sizes: dict[str, int] = eval(mesh)
    how = length, "ring", *BATCHES[0], "going_round"
    wanted = alone.run("torch", RUN, None, 0, *how)
    for found in worlds.get(setting).call(RUN, sizes, 3 if "data" in sizes else 0, *how):
        same(found, wanted)
        assert found["_sent"]["permute"]
        assert not found["_sent"]["all_to_all"]


def test_programs_whose_keys_go_round(alone: Alone, worlds: Worlds) -> None:
    how = 8, "ring", 4, 4, "going_round"
    for found in worlds.get("torch-2").call(AS_PROGRAMS, RUN, TWO, 0, *how):
        same(found, alone.run("torch", RUN, None, 0, *how))
        assert found["_unfit"] == []
        assert found["_sent"]["permute"]


def test_programs(expected: Any, worlds: Worlds) -> None:
    """Of full batches: a ragged one would be traced once more, for as long."""
    how = LENGTHS[0], "ulysses", 4, 4
    for found in worlds.get("torch-2").call(AS_PROGRAMS, RUN, TWO, 0, *how):
        same(found, expected(*how))
        assert found["_unfit"] == []
        assert found["_sent"]["all_to_all"]


@pytest.mark.parametrize(("setting", "mesh", "zero", "batch", "rows"), unless_all(FEW_OF_JAX, EVERY_OF_JAX))
def test_the_compiler_cuts_it_as_one_device(
    setting: str, mesh: str, zero: int, batch: int, rows: int, of_jax: Any, worlds: Worlds
) -> None:
    sizes: dict[str, int] = eval(mesh)
    for found in worlds.get(setting).call(RUN, sizes, zero, LENGTHS[1], "auto", batch, rows):
        same(found, of_jax(batch, rows))
        assert found["_sent"]["all_reduce"], "sums of weights' gradients"
        assert found["_sent"]["all_gather"], "keys and values"


@pytest.mark.parametrize("setting", ["sim-jax", "jax-2x2"])
def test_lengths_that_do_not_divide_are_refused_by_jax(setting: str, worlds: Worlds) -> None:
    words = r"LayoutError: an input of shape \(4, 7\): its 7 places \(dim 1\) do not divide into the 2 parts"
    with pytest.raises(Exception, match=words):
        worlds.get(setting).call(RUN, ACROSS, 0, LENGTHS[0])


def test_jax_leaves_the_way_to_its_compiler(worlds: Worlds) -> None:
    with pytest.raises(Exception, match=r"CapabilityError: attention='gather': with Keras on 'jax' the compiler"):
        worlds.get("sim-jax").call(MADE, {"context": 4}, attention="gather")


def test_tensorflow_refuses(worlds: Worlds) -> None:
    with pytest.raises(Exception, match=r"CapabilityError: an axis of contexts \('context',\): with Keras on"):
        worlds.get("sim-tensorflow").call(MADE, {"context": 4})
