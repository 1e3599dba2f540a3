"""A model that is changed between its trainings, or in the middle of one, goes on as on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import pairwise, unless_all

pytestmark = pytest.mark.processes

CASES = (
    *("recompiled", "another_loss", "another_optimizer", "layer_added", "another_head", "activation", "activity"),
    *("mode_between", "mode_in_training", "features_in_training", "features_often", "activation_in_training"),
    "compiled_in_training",
)
# What Keras sees on JAX and TensorFlow too, which keep the program that they have traced until compile is called.
TRACED = ("recompiled", "another_loss", "layer_added", "another_head", "activation", "activity")
RUN = "tests.keras.changing:changed"
PLACES = [
    *(("sim-torch", kind, zero) for kind in ("dp", "2x2") for zero in (0, 1, 3)),
    *(("torch-2", "dp", zero) for zero in (0, 3)),
    ("torch-4", "2x2", 0),
    ("horovod-2", "dp", 0),
]
# Horovod and four processes run the engine that the simulator and two run: with other groups and collectives.
OF_EACH_KIND = unless_all(
    ("another_loss", "layer_added", "activity", "mode_between", "features_in_training", "compiled_in_training"), CASES
)
ROWS = [
    (*place, case) for place in PLACES for case in (OF_EACH_KIND if place[0] in ("torch-4", "horovod-2") else CASES)
]
# Those that another loss, or another layer, is a case of: on torch above.
FEW = unless_all(("another_loss", "layer_added", "activity"), TRACED)


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    def run(keras: str, program: str, *args: Any) -> Any:
        place = "trainers" if program == "in_turn" else "changing"
        return alone.world(keras).call(f"tests.keras.{place}:{program}", *args)[0]

    return cache(run)


@pytest.mark.parametrize(("setting", "kind", "zero", "case"), pairwise(ROWS))
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, case: str, expected: Any, worlds: Worlds) -> None:
    for found in worlds.get(setting).call(RUN, kind, zero, case):
        same(found, expected("torch", "changed", None, 0, case))


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize(("setting", "kind", "zero"), [("jax-4", "2x2", 1), ("tensorflow-4", "dp", 0)])
def test_what_is_traced_is_traced_again(
    setting: str, kind: str, zero: int, case: str, expected: Any, worlds: Worlds
) -> None:
    keras = setting.split("-")[0]
    same(worlds.get(setting).call(RUN, kind, zero, case)[0], expected(keras, "changed", None, 0, case))


@pytest.mark.parametrize(("setting", "kind"), [("sim-torch", "2x2"), ("torch-4", "2x2")])
def test_two_models_share_a_layer_of_their_pairs(setting: str, kind: str, expected: Any, worlds: Worlds) -> None:
    for found in worlds.get(setting).call("tests.keras.changing:shared", kind):
        same(found, expected("torch", "shared", None))
        assert "a/kernel" in found["sharded"]


IN_TURN = ("distilled", "distilled_elsewhere", "heads", "adversaries", "part_and_whole", "hidden")
MESHES = {"sim-torch": {"data": 2, "model": 2}, "torch-2": {"model": 2}, "jax-4": {"data": 2, "model": 2}}
TURNS = [
    *(("sim-torch", case) for case in IN_TURN),
    *(("torch-2", case) for case in unless_all(("distilled_elsewhere", "adversaries", "hidden"), IN_TURN)),
    *(("jax-4", case) for case in unless_all(("distilled", "adversaries"), IN_TURN)),
]


@pytest.mark.parametrize(("setting", "case"), TURNS)
def test_trainers_work_with_the_same_layers_in_turn(setting: str, case: str, expected: Any, worlds: Worlds) -> None:
    """Layouts are found. Each trainer has pairs of its own."""
    wanted = expected(setting.split("-")[0].replace("sim", "torch"), "in_turn", None, case)
    for found in worlds.get(setting).call("tests.keras.trainers:in_turn", MESHES[setting], case):
        same(found, wanted)
        assert found["sharded"]
        assert found["_sent"]
        assert found["paired"] or setting == "jax-4"


@pytest.mark.parametrize(("kind", "zero", "other"), [("dp", 0, "2x2"), ("2x2", 1, "dp")])
def test_a_teacher_is_on_another_mesh(kind: str, zero: int, other: str, expected: Any, worlds: Worlds) -> None:
    for found in worlds.get("sim-torch").call("tests.keras.changing:taught", kind, zero, other):
        same(found, expected("torch", "taught", None, 0, other))


def test_what_is_trained_is_on_one_mesh(worlds: Worlds) -> None:
    for said in worlds.get("sim-torch").call("tests.keras.changing:nested", "dp", "2x2", 0):
        assert "trains variables on two meshes: 'changing/a/kernel' on Mesh({'data': 2, 'model': 2})" in said
        assert "or set trainable=False" in said


def test_parts_that_are_fetched_are_on_the_mesh_of_the_model(worlds: Worlds) -> None:
    for said in worlds.get("sim-torch").call("tests.keras.changing:nested", "dp", "2x2", 3):
        assert "'changing/a/kernel' is stored by zero=3 on Mesh({'data': 2, 'model': 2})" in said
