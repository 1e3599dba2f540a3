"""The contract on torch: one device's numbers on the global batch, whatever the optimizer, the loss or the loop; in two
and four processes and in the simulator, at every stage of ZeRO. (On JAX: tests/keras/jax.)"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same, same_bits
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.contract:{}".format
ALONE = (None, 0)
# (backend, strategy, stage)
WHERE = [
    ("sim-torch", "2x2", 3),
    ("torch-2", "dp", 1),
    ("torch-2", "dp", 3),
    ("torch-4", "2x2", 3),
    ("horovod-2", "dp", 3),
]
PLACES = [("sim-torch", "2x2"), ("torch-2", "dp"), ("torch-4", "2x2"), ("horovod-2", "dp")]
PROMISES = [
    "clipnorm",
    "global clipnorm",
    "clipvalue",
    "schedule",
    "ema",
    "ema at the end",
    "accumulation",
    "scaled accumulation",
    "decay",
    "overflow",
    "scaled",
]
# Which update their parts as ever, or are given whole variables.
OTHERS = ["rmsprop", "lion", "adagrad", "nadam", "adafactor", "lamb", "muon", "schedule free", "several"]
# Which override what sees all gradients.
OVERRIDDEN = ["own apply", "own gradients"]
# Each promise at one place in turn, at every stage somewhere: the engine is one for all of them.
OPTIMIZERS = [
    *(
        (*place, 1 + (k + turn) % 3, name)
        for turn, place in enumerate(PLACES)
        for k, name in enumerate(PROMISES)
        if unless_all((k + turn) % 4 == 0, True)
    ),
    *((*PLACES[k % 4], 1 + k % 3, name) for k, name in enumerate(OTHERS)),
    *((*place, zero, name) for place, zero in zip(PLACES[1:3], (1, 3), strict=True) for name in OVERRIDDEN),
]


def in_turn(cases: Sequence[Any]) -> list[Any]:
    """Each case at one place: the engine is one for all of them."""
    return unless_all(
        [(case, WHERE[-1 - k]) for k, case in enumerate(cases)], [(case, where) for case in cases for where in WHERE]
    )


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return cache(lambda program, *args: alone.world("torch").call(RUN(program), *args)[0])


@pytest.fixture
def everywhere(worlds: Worlds, expected: Any) -> Any:
    """Checks that a program gives one device's numbers on every process."""

    def check(where: tuple[str, str, int], program: str, *args: Any) -> list[Any]:
        setting, kind, zero = where
        results = worlds.get(setting).call(RUN(program), kind, zero, *args)
        for found in results:
            same(found, expected(program, *ALONE, *args))
            assert found["sharded"]
        return results

    return check


@pytest.mark.parametrize(("setting", "kind", "zero", "name"), OPTIMIZERS)
def test_optimizers(everywhere: Any, setting: str, kind: str, zero: int, name: str) -> None:
    everywhere((setting, kind, zero), "optimized", name)


# What steps that are programs compute, at every stage of ZeRO.
AS_PROGRAMS = [
    *(("optimized", name) for name in (*PROMISES, *OTHERS, *OVERRIDDEN)),
    *(("built", name) for name in ("regularized", "covariance", "besides", "lora")),
    *(("measured", name) for name in ("binary", "own", "state")),
    *(("looked_up", name) for name in ("tied", "normalized", "spectral")),
    *((program,) for program in ("toggled", "thawed", "few", "several")),
]


# One device, several that hold the same weights, and several that hold parts.
PROGRAMS_IN = [("torch-1", "dp"), ("torch-2", "dp"), ("torch-4", "2x2")]
# A net of convolutions has nothing to be cut by a model axis.
PROGRAMS = [
    (*place, k) for k, (name, *_) in enumerate(AS_PROGRAMS) for place in PROGRAMS_IN[: 2 if name == "thawed" else 3]
]
# To trace a step of four processes takes longest.
FEW_PROGRAMS = [
    ("torch-2", "dp", 26),
    ("torch-1", "dp", 15),
    ("torch-4", "2x2", 20),
    ("torch-2", "dp", 30),
]


@pytest.mark.parametrize(("setting", "kind", "k"), unless_all(FEW_PROGRAMS, PROGRAMS))
def test_steps_that_are_programs(setting: str, kind: str, k: int, worlds: Worlds, expected: Any) -> None:
    """All but the first, compared with one device's as they are."""
    program, *args = AS_PROGRAMS[k]
    for found in worlds.get(setting).call("tests.keras.torch.promised:run", RUN(program), kind, k % 4, *args):
        assert found["_unfit"] == []
        assert found["_programs"] > 0
        same(found, expected(program, *ALONE, *args))


@pytest.mark.parametrize("k", unless_all([5], range(len(AS_PROGRAMS))))
def test_the_simulator_runs_them_as_they_are(k: int, worlds: Worlds, expected: Any) -> None:
    program, *args = AS_PROGRAMS[k]
    (found,) = worlds.get("sim-torch").call("tests.keras.torch.promised:run", RUN(program), "dp", k % 4, *args)
    assert found["_programs"] == 0
    same(found, expected(program, *ALONE, *args))


@pytest.mark.parametrize("name", ["sim-torch", "torch-2"])
def test_all_gradients_of_an_accumulation_are_refused(name: str, worlds: Worlds) -> None:
    for outcome in worlds.get(name).outcomes(RUN("optimized"), "dp", 0, "own apply, accumulation").values():
        assert outcome.failure is not None
        assert "OfAllGradients overrides apply, which is not given whole gradients with" in str(outcome.failure)


def test_an_overflow_skips_the_step(expected: Any) -> None:
    """The case above is one: its first losses overflow, and the scale goes down."""
    assert expected("optimized", *ALONE, "overflow")["slots"][1] < 2.0**127


@pytest.mark.parametrize(("name", "where"), in_turn(["regularized", "covariance", "besides", "lora"]), ids=str)
def test_models_and_losses(everywhere: Any, where: tuple[str, str, int], name: str) -> None:
    for found in everywhere(where, "built", name):
        cut = {path.rpartition("/")[0] for path in found["sharded"]}
        assert name != "lora" or where[2] < 3 or cut >= {"ids", "a", "b"}


@pytest.mark.parametrize("where", [("sim-torch", "2x2", 0), ("torch-4", "2x2", 3)], ids=str)
def test_a_bias_may_be_the_same_along_the_cut(everywhere: Any, where: tuple[str, str, int]) -> None:
    for found in everywhere(where, "built", "spread"):
        assert {"a/kernel", "b/kernel"} <= set(found["sharded"])


@pytest.mark.parametrize(("name", "where"), in_turn(["binary", "own", "state"]), ids=str)
def test_metrics(everywhere: Any, where: tuple[str, str, int], name: str) -> None:
    everywhere(where, "measured", name)


@pytest.mark.parametrize(("program", "where"), in_turn(["toggled", "few", "several"]), ids=str)
def test_loops(everywhere: Any, where: tuple[str, str, int], program: str) -> None:
    everywhere(where, program)


@pytest.mark.parametrize("where", [("sim-torch", "dp", 3), ("horovod-2", "dp", 3)], ids=str)
def test_a_frozen_base_is_thawed(everywhere: Any, where: tuple[str, str, int]) -> None:
    everywhere(where, "thawed")


@pytest.mark.parametrize("where", WHERE[2:], ids=str)
def test_two_runs_with_one_seed_are_the_same_to_the_last_bit(worlds: Worlds, where: tuple[str, str, int]) -> None:
    setting, kind, zero = where
    once, again = (worlds.get(setting).call(RUN("seeded"), kind, zero) for _ in range(2))
    for found in (*once, *again):
        same_bits(found, once[0])


@pytest.mark.parametrize(("setting", "zero"), [("torch-4", 3), ("horovod-2", 1)])
def test_documented_steps_of_the_users_own(worlds: Worlds, setting: str, zero: int) -> None:
    """All of them: tests/keras/torch/test_steps.py, in the simulator."""
    worlds.get(setting).call("tests.keras.torch.cases:own_steps", zero)


@pytest.mark.parametrize("how", ["shorter", "shorter arrays", "raises"])
def test_own_parts_that_end_apart_are_told_over_horovod(worlds: Worlds, how: str) -> None:
    """Over torch.distributed: tests/keras/torch/test_data.py."""
    first, second = worlds.get("horovod-2").call("tests.keras.torch.cases:apart", how)
    assert first[0] == "DesyncError"
    assert second == (("OSError", "the disk of process 1 is gone") if how == "raises" else first)


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
def test_what_one_process_raised_over_horovod_is_told_by_the_others(hook: str, worlds: Worlds) -> None:
    """Before a step, or where they agree behind one: it catches the error and goes on to something else, while process
    0 trains on. (With Keras on TensorFlow Horovod finds no names of collectives: there the one that waits gets a
    ProcessLostError.)"""
    first, second = worlds.get("horovod-2").call("tests.parity.mistakes:raises_in_a_callback", hook)
    for kind, message in (first, second):
        assert kind == "DesyncError"
        assert "rank 1 came to barrier after 'OSError: no space left for this callback' was raised" in message
    assert first[1].startswith("all_")
    assert second[1].startswith("barrier")
