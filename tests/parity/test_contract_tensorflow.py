"""The contract on TensorFlow: one device's numbers on the global batch; over DTensor on four devices, of one process
and of two, at every stage of ZeRO, and over Horovod.

(On torch: test_contract; on JAX: tests/keras/jax.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parity.compare import assert_same_values
from tests.parity.test_contract import OTHERS, OVERRIDDEN, PROMISES
from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same, same_bits
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.contract:{}".format
COUNTED = "tests.keras.counted:{}".format
ALONE = (None, 0)
# (setting, strategy, stage)
WHERE = [("tensorflow-4", "2x2", 3), ("horovod-2-tensorflow", "dp", 0)]
IN_PROCESSES = ("tensorflow-2x2", "2x2", 1)
EVERYWHERE = [*WHERE, IN_PROCESSES]
# Promises that one optimizer can keep at once, together: each program takes seconds to compile.
TOGETHER = ["clipnorm, schedule, ema", "global clipnorm, decay"]
FEW = [*TOGETHER, "scaled accumulation"]
# DTensor computes all updates of one program; in the last one a part is Muon's.
WITH_OTHER_SLOTS = ["adafactor", "several"]
# Each promise at one stage of DTensor. Over Horovod gradients are whole everywhere, and Keras and its user do the rest.
OPTIMIZERS = [
    *(
        ("tensorflow-4", "2x2", k % 4, name)
        for k, name in enumerate([*unless_all(FEW, PROMISES), *unless_all(WITH_OTHER_SLOTS, OTHERS)])
    ),
    *(("horovod-2-tensorflow", "dp", 0, name) for name in unless_all((FEW[0], "own apply"), [*PROMISES, *OVERRIDDEN])),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return cache(lambda program, *args: alone.world("tensorflow").call(RUN(program), *args)[0])


@pytest.fixture
def everywhere(worlds: Worlds, expected: Any) -> Any:
    """Checks that a program gives one device's numbers on every process."""

    def check(where: tuple[str, str, int], program: str, *args: Any) -> None:
        setting, kind, zero = where
        for found in worlds.get(setting).call(RUN(program), kind, zero, *args):
            same(found, expected(program, *ALONE, *args))
            assert bool(found["sharded"]) == (kind != "dp")

    return check


@pytest.mark.parametrize(("setting", "kind", "zero", "name"), OPTIMIZERS)
def test_optimizers(everywhere: Any, setting: str, kind: str, zero: int, name: str) -> None:
    everywhere((setting, kind, zero), "optimized", name)


# Each at one place; Horovod averages gradients behind Keras's own step, whatever they are of.
BUILT = [(where, name) for name in ("regularized", "covariance", "besides", "lora") for where in WHERE]


@pytest.mark.parametrize(("where", "name"), unless_all([*BUILT[::2], BUILT[5]], BUILT), ids=str)
def test_models_and_losses(everywhere: Any, where: tuple[str, str, int], name: str) -> None:
    everywhere(where, "built", name)


MEASURED = [(where, name) for name in ("binary", "own") for where in WHERE]


@pytest.mark.parametrize(("where", "name"), unless_all([MEASURED[1], MEASURED[2]], MEASURED), ids=str)
def test_metrics(everywhere: Any, where: tuple[str, str, int], name: str) -> None:
    everywhere(where, "measured", name)


@pytest.mark.parametrize(("program", "where"), [("toggled", WHERE[0]), *(("few", where) for where in WHERE)], ids=str)
def test_loops(everywhere: Any, where: tuple[str, str, int], program: str) -> None:
    everywhere(where, program)


def test_a_process_without_pictures_counts_none(everywhere: Any) -> None:
    everywhere(WHERE[1], "few_pictures")


# What processes agree on, one does.
@pytest.mark.parametrize("where", unless_all(EVERYWHERE[1:], EVERYWHERE), ids=str)
def test_two_runs_with_one_seed_are_the_same_to_the_last_bit(worlds: Worlds, where: tuple[str, str, int]) -> None:
    setting, kind, zero = where
    once, again = (worlds.get(setting).call(RUN("seeded"), kind, zero) for _ in range(2))
    for found in (*once, *again):
        same_bits(found, once[0])


@pytest.mark.parametrize("where", unless_all(EVERYWHERE[1:], EVERYWHERE), ids=str)
def test_dropout_draws_apart_for_rows_and_units_that_are_cut(worlds: Worlds, where: tuple[str, str, int]) -> None:
    """Of independent numbers about half differ; of equal ones none."""
    setting, kind, zero = where
    for found in worlds.get(setting).call(COUNTED("apart"), kind, zero):
        assert 0.25 < found["_between_rows"] < 0.75
        assert 0.25 < found["_between_units"] < 0.75


def test_batch_statistics_that_are_asked_for_of_all_replicas(everywhere: Any) -> None:
    """synchronized=True, which Keras takes on TensorFlow alone. Those of all rows are computed without it too."""
    everywhere(WHERE[1], "built_in_float64", "synchronized")


STEPS = [(w, how) for w in (("tensorflow-4", "2x2", 1), *EVERYWHERE[1:]) for how in ("trackers", "two optimizers")]


@pytest.mark.parametrize(("where", "how"), unless_all([STEPS[2], STEPS[5]], STEPS), ids=str)
def test_documented_steps_of_the_users_own(worlds: Worlds, alone: Alone, where: tuple[str, str, int], how: str) -> None:
    setting, kind, zero = where
    wanted = alone.world("tensorflow").call("tests.parity.steps:run", how, *ALONE)[0]
    for found in worlds.get(setting).call("tests.parity.steps:run", how, kind, zero):
        same(found, wanted)
        assert bool(found["sharded"]) == (kind != "dp")


def test_tensorboard_is_written_once(worlds: Worlds, tmp_path: Path) -> None:
    setting, kind, _ = IN_PROCESSES
    for found in worlds.get(setting).call(RUN("boarded"), kind, 0, str(tmp_path)):
        assert found == [str(tmp_path)]
    assert len([p for p in (tmp_path / "train").iterdir() if "tfevents" in p.name]) == 1


def test_models_that_processes_made_apart_begin_with_the_firsts_weights(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.world("tensorflow").call("tests.parity.interplay:made_apart", 0)[0]
    for found in worlds.get("horovod-2-tensorflow").call("tests.parity.interplay:made_apart", None):
        assert_same_values(found, wanted)


@pytest.mark.parametrize("axes", [{"data": 4}, {"host": 2, "device": 2}, {"host": 3, "device": 2}], ids=str)
def test_rows_over_horovod_are_cut_as_they_are_joined(axes: dict[str, int], alone: Alone) -> None:
    """Of two data axes too, where processes would otherwise wait for rows that nobody has."""
    assert alone.world("tensorflow").call("tests.parity.interplay:cut_over_horovod", axes) == [[]]


def test_a_state_of_whole_batches_over_horovod(worlds: Worlds) -> None:
    for kind, message in worlds.get("horovod-2-tensorflow").call("tests.parity.mistakes:stateful_layer"):
        assert kind == "CapabilityError"
        assert "built for, but each of 2 devices gets 3, and no device" in message


def test_one_condition_chooses_between_rows_of_all(everywhere: Any) -> None:
    """DTensor crashed the process."""
    everywhere(WHERE[0], "looked_up", "chosen")


def test_what_a_layer_keeps_as_tensors_is_on_every_mesh(everywhere: Any) -> None:
    everywhere(WHERE[0], "looked_up", "normalized")


def test_what_a_model_of_ones_own_keeps_as_tensors_is_on_every_mesh(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.world("tensorflow").call("tests.keras.alike:kept", None, 0)[0]
    same(worlds.get("tensorflow-4").call("tests.keras.alike:kept", "dp", 0)[0], wanted)


def test_it_is_on_the_mesh_without_a_program_too(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.world("tensorflow").call("tests.keras.alike:adapted", None, 0, True)[0]
    same(worlds.get("tensorflow-4").call("tests.keras.alike:adapted", "dp", 0, True)[0], wanted)


@pytest.mark.parametrize(
    ("name", "optimizer", "eagerly"),
    [
        ("positions", "adam", False),
        ("positions", "adagrad", True),
        ("proxies", "adam", False),
    ],
)
def test_what_all_ranks_look_up_counts_once(
    name: str, optimizer: str, eagerly: bool, alone: Alone, worlds: Worlds
) -> None:
    """Keras's optimizers on TensorFlow square the gradients of an id's occurrences one by one."""
    wanted = alone.world("tensorflow").call("tests.keras.alike:looked_up", None, 0, name, optimizer, eagerly)[0]
    world = worlds.get("horovod-2-tensorflow")
    for found in world.call("tests.keras.alike:looked_up", "dp", 0, name, optimizer, eagerly):
        same(found, wanted)


def test_ids_of_64_bits_that_a_program_knows(alone: Alone, worlds: Worlds) -> None:
    """DTensor's compiler ended the process."""
    of = "prompt", "adagrad", False
    wanted = alone.world("tensorflow").call("tests.keras.alike:looked_up", None, 0, *of)[0]
    same(worlds.get("tensorflow-4").call("tests.keras.alike:looked_up", "dp", 0, *of)[0], wanted)


@pytest.mark.parametrize("setting", ["horovod-2-tensorflow", "tensorflow-4"])
def test_data_whose_length_is_not_known_ends(setting: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.world("tensorflow").call("tests.keras.alike:ended", None, 0)[0]
    for found in worlds.get(setting).call("tests.keras.alike:ended", "dp", 0):
        same(found, wanted)


@pytest.mark.parametrize(("name", "setting"), [("clipping", "horovod-2-tensorflow"), ("penalized", "tensorflow-4")])
def test_a_step_of_ones_own_sees_the_gradients_of_all_rows(
    name: str, setting: str, alone: Alone, worlds: Worlds
) -> None:
    wanted = alone.world("tensorflow").call("tests.keras.tape:stepped", None, 0, name)[0]
    for found in worlds.get(setting).call("tests.keras.tape:stepped", "dp", 0, name):
        same(found, wanted)
