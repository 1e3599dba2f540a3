"""Experts that devices share out train as on one device: routers, biases, losses of their load."""

from __future__ import annotations

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import each_value

pytestmark = pytest.mark.processes

EXPERTS = 4
RUN = "tests.keras.experts:trained"
AS_PROGRAMS = "tests.keras.torch.promised:run"
TWO, FOUR, GRID = {"model": 2}, {"model": 4}, {"data": 2, "model": 2}
# Experts that data shards share out.
PAIR, SHARED, BESIDE = {"expert": 2}, {"data": 2, "expert": 2}, {"expert": 2, "model": 2}
MESHES = {
    "sim-torch": (FOUR, GRID, SHARED, BESIDE),
    "torch-2": (TWO, PAIR),
    "torch-4": (FOUR, GRID, SHARED, BESIDE),
    "horovod-2": (TWO, PAIR),
}
PLACES = [
    (setting, str(mesh), zero if "data" in mesh or "expert" in mesh else 0, experts)
    for setting, meshes in {**MESHES, "sim-jax": (FOUR, GRID, SHARED), "jax-4": (GRID, SHARED)}.items()
    for mesh in meshes
    for zero in (0, 1, 3)
    for experts in ("all", "dispatch")
]


# A mesh meets each stage in each of the two frameworks, and each way.
SAMPLE = each_value(
    dict.fromkeys(PLACES),
    lambda row: (row[0], ("jax" in row[0], *row[1:3]), row[1::2]),
    cost=lambda row: SETTINGS[row[0]].processes,
)


@pytest.mark.parametrize(("setting", "mesh", "zero", "experts"), SAMPLE)
def test_it_trains_as_one_device(
    setting: str, mesh: str, zero: int, experts: str, alone: Alone, worlds: Worlds
) -> None:
    sizes: dict[str, int] = eval(mesh)
    framework = "jax" if "jax" in setting else "torch"
    expected = alone.run(framework, RUN, None)
    held = sizes.get("expert", sizes.get("model", 1)) * (sizes.get("data", 1) if zero == 3 else 1)
    for found in worlds.get(setting).call(RUN, sizes, zero, experts):
        same(found, expected)
        assert found["_held"] == dict.fromkeys(("up", "low", "down"), EXPERTS // held)
        assert ("dispatch: each expert" in found["_why"]) is (experts == "dispatch")
        if framework == "torch":  # on JAX the ledger is a compiled program's
            assert found["_sent"]["all_reduce"] or "expert" in sizes


@pytest.mark.parametrize("setting", ["torch-4", "sim-torch", "horovod-4"])
def test_devices_whose_experts_nobody_chooses(setting: str, alone: Alone, worlds: Worlds) -> None:
    """Of four devices with an expert each two get no rows, forward and backward."""
    expected = alone.run("torch", RUN, None, 0, "all", True)
    for found in worlds.get(setting).call(RUN, {"expert": 4}, 0, "dispatch", True):
        same(found, expected)
        assert "which are sent to its device" in found["_why"]


@pytest.mark.parametrize("setting", ["torch-2", "horovod-2"])
def test_a_device_that_dies_as_rows_are_sent_is_told(setting: str) -> None:
    """In an exchange of uneven parts, where the others wait for rows of a number that they know already."""
    with SETTINGS[setting].world() as world:
        found = world.outcomes("tests.keras.experts:dying", 2)
    kinds = [found[k].failure.kind for k in (0, 1)]
    assert kinds == ["ProcessLostError", "ended"]
    assert "all_to_all" in str(found[0].failure)


def test_tensorflow_refuses_to_dispatch(worlds: Worlds) -> None:
    with pytest.raises(Exception, match=r"CapabilityError: experts='dispatch': with Keras on 'tensorflow'"):
        worlds.get("sim-tensorflow").call("tests.keras.experts:dispatched")


@pytest.mark.parametrize("experts", ["all", "dispatch"])
def test_programs(experts: str, alone: Alone, worlds: Worlds) -> None:
    """In a program all experts compute: it has one shape for all batches, and these are full."""
    for found in worlds.get("torch-2").call(AS_PROGRAMS, RUN, TWO, 0, experts, False, 8):
        same(found, alone.run("torch", RUN, None, 0, "all", False, 8))
        assert found["_unfit"] == []
