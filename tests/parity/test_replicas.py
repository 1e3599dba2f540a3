"""ZeRO within one of two data axes, with replicas along the other, trains as one device, and sends the closed form."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.replicas:trained"
ON_EIGHT = "tests.keras.replicas:on_eight"
AS_PROGRAMS = "tests.keras.torch.promised:run"
# Along which axis shards are: ranks that follow each other, or that are apart.
MESHES = ({"replica": 2, "shard": 2}, {"shard": 2, "replica": 2})
ON_TORCH = ("sim-torch", "torch-4", "horovod-4")
OTHERS = ("sim-jax", "jax-4", "jax-2x2")
ALL = [(setting, k, zero) for setting in (*ON_TORCH, *OTHERS) for k in (0, 1) for zero in (1, 2, 3)]
PLACES = [
    *(("sim-torch", k, zero) for k in (0, 1) for zero in (1, 3)),
    *(("torch-4", 0, 3), ("horovod-4", 1, 1), ("sim-jax", 0, 3), ("jax-4", 0, 1), ("jax-4", 1, 3), ("jax-2x2", 0, 3)),
]


@pytest.mark.parametrize(("setting", "mesh", "zero"), unless_all(PLACES, ALL))
def test_it_trains_as_one_device(setting: str, mesh: int, zero: int, alone: Alone, worlds: Worlds) -> None:
    expected = alone.run(SETTINGS[setting].keras, RUN, None)
    for found in worlds.get(setting).call(RUN, MESHES[mesh], zero):
        same(found, expected)
        held(found, zero)
        (sent if setting in ON_TORCH else sent_as_compiled)(found, zero)


def held(found: Any, zero: int) -> None:
    """Each device holds a half of all, or a whole, and two slots of each half."""
    assert found["_held"] == found["_bytes"] // (2 if zero == 3 else 1)
    assert found["_slots"] == pytest.approx(found["_bytes"], abs=16)  # the count of steps, the rate


def sent(found: Any, zero: int) -> None:
    """Of P bytes on 2 x 2: (n-1)/n P scattered among shards, and 2 (n-1)/n of the half that is left among replicas."""
    once, of_gradients = found["_steps"] * found["_bytes"] / 2, {}
    for what, size in found["_sent"].items():
        op, axes, purpose = what.split(" ", 2)
        assert axes != "replica" or op not in ("all_gather", "reduce_scatter")
        if purpose == "gradient":
            of_gradients[op, axes] = size
    assert of_gradients == {("reduce_scatter", "shard"): once, ("all_reduce", "replica"): once}
    gathered = found["_sent"]["all_gather shard parameters"]
    assert gathered >= once if zero == 3 else gathered == once


def sent_as_compiled(found: Any, zero: int) -> None:
    """As the program says that XLA made: what no shard axis cuts (a bias, the loss) is summed over both at once."""
    once, of_steps = found["_steps"] * found["_bytes"] / 2, {}
    for what, size in found["_sent"].items():
        op, axes, purpose = what.split(" ", 2)
        assert axes != "replica" or op == "all_reduce"
        if purpose == "train step (compiled)":
            of_steps[op, frozenset(axes.split(","))] = size
    shard, replica = frozenset(["shard"]), frozenset(["replica"])
    assert 0.9 * once < of_steps["reduce_scatter", shard] == of_steps["all_reduce", replica] <= once
    assert of_steps["all_reduce", shard | replica] < once / 3
    assert of_steps["all_gather", shard] >= of_steps["reduce_scatter", shard]


@pytest.mark.parametrize(
    ("setting", "zero"),
    unless_all([("sim-torch", 3), ("sim-jax-8", 3)], [(s, z) for s in ("sim-torch", "sim-jax-8") for z in (1, 2, 3)]),
)
def test_beside_a_model_axis(setting: str, zero: int, alone: Alone, worlds: Worlds) -> None:
    run = RUN if setting == "sim-jax-8" else ON_EIGHT
    for found in worlds.get(setting).call(run, {"replica": 2, "shard": 2, "model": 2}, zero):
        same(found, alone.run(SETTINGS[setting].keras, RUN, None))
        assert found["_held"] <= found["_bytes"] / (3 if zero == 3 else 1.5)
        if setting == "sim-torch":
            assert {tuple(what.split(" ")[:2]) for what in found["_sent"] if what.endswith(" gradient")} == {
                ("reduce_scatter", "shard"),
                ("all_reduce", "replica"),
            }


@pytest.mark.parametrize("setting", ["sim-tensorflow", "tensorflow-4"])
def test_dtensor_cuts_rows_over_one_axis(setting: str, worlds: Worlds) -> None:
    with pytest.raises(Exception, match="CapabilityError: DTensor shards a dim over one axis"):
        worlds.get(setting).call(RUN, MESHES[0], 1)


@pytest.mark.parametrize("zero", [1, 3])
def test_programs(zero: int, alone: Alone, worlds: Worlds) -> None:
    """Of full batches: a ragged one would be traced once more, for as long."""
    for found in worlds.get("torch-4").call(AS_PROGRAMS, RUN, MESHES[0], zero, 24):
        same(found, alone.run("torch", RUN, None, 0, 24))
        assert found["_unfit"] == []
        held(found, zero)
