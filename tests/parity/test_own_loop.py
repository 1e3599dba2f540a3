"""A loop of one's own on torch means what it means under DistributedDataParallel, whatever was called before it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import close, same
from tests.support.sampling import each_value

pytestmark = pytest.mark.processes

RUN = "tests.keras.loops:looped"


@pytest.mark.parametrize("setting", ["torch-2", "horovod-2"])
@pytest.mark.parametrize("own", [True, False], ids=["own rows", "the same rows"])
@pytest.mark.parametrize("before", ["nothing", "predict", "parallelize", "fit"])
def test_gradients_are_averaged_over_the_processes(
    before: str, own: bool, setting: str, alone: Alone, worlds: Worlds
) -> None:
    wanted = alone.run("torch", RUN, None, before, own)
    found = worlds.get(setting).call(RUN, "dp", before, own)
    for one in found:
        same(one, wanted)
    np.testing.assert_allclose(np.mean([one["losses"] for one in found], 0), wanted["losses"], atol=1e-5)


SIMULATED = [("dp", 0), ("dp", 2), ("dp", 3), ("mp", 0), ("2x2", 1), ("2x2", 3)]


@pytest.mark.parametrize("by", ["torch", "keras", "data"])
@pytest.mark.parametrize(("kind", "zero"), SIMULATED)
def test_the_simulators_program_is_one_devices(kind: str, zero: int, by: str, alone: Alone, worlds: Worlds) -> None:
    program = "tests.keras.loops:outside"
    (found,) = worlds.get("sim-torch").call(program, kind, zero, by)
    same(found, alone.run("torch", program, None, 0, by))
    assert found["sharded"] == (kind != "dp" or zero > 0)


@pytest.mark.parametrize("by", ["torch", "keras", "data"])
def test_rows_that_a_sampler_deals_out_make_one_devices_steps(by: str, alone: Alone, worlds: Worlds) -> None:
    """The simulator is one process, to which all rows are dealt."""
    program = "tests.keras.loops:outside"
    wanted = alone.run("torch", program, None, 0, by)["weights"]
    for setting in ("sim-torch", "torch-2"):
        for found in worlds.get(setting).call(program, "dp", 0, by, True):
            close(found["weights"], wanted)


@pytest.mark.parametrize(
    ("before", "zero", "zeroes", "derived"),
    [
        ("nothing", 3, "variables", True),
        ("predict", 1, "parameters", False),
        ("parallelize", 0, "zero_grad", False),
        ("fit", 2, "zero_grad", True),
    ],
)
def test_a_loop_in_the_simulator_is_one_devices(
    before: str, zero: int, zeroes: str, derived: bool, alone: Alone, worlds: Worlds
) -> None:
    given = (before, False, zero, zeroes, derived)
    wanted = alone.run("torch", RUN, None, *given)
    (found,) = worlds.get("sim-torch").call(RUN, "dp", *given)
    same(found, wanted)
    np.testing.assert_allclose(found["losses"], wanted["losses"], atol=1e-5)


@pytest.mark.parametrize("zeroes", ["zero_grad", "variables", "parameters"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_that_are_kept_in_parts_are_of_one_step(zero: int, zeroes: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("torch", RUN, None, "nothing", True)
    for one in worlds.get("torch-2").call(RUN, "dp", "nothing", True, zero, zeroes):
        same(one, wanted)


@pytest.mark.parametrize(
    ("setting", "zero"), [("torch-2", 0), ("torch-2", 2), ("torch-2", 3), ("horovod-2", 0), ("horovod-2", 3)]
)
def test_gradients_of_autograd_grad_are_averaged_too(setting: str, zero: int, alone: Alone, worlds: Worlds) -> None:
    given = (True, zero, "zero_grad", True)
    wanted = alone.run("torch", RUN, None, "nothing", *given)
    for found in worlds.get(setting).call(RUN, "dp", "nothing", *given):
        same(found, wanted)


@pytest.mark.parametrize(("setting", "zero"), [("sim-torch", 1), ("sim-torch", 3), ("torch-2", 3)])
def test_steps_whose_gradients_are_not_finite_are_left_out(
    setting: str, zero: int, alone: Alone, worlds: Worlds
) -> None:
    given = (setting == "torch-2", zero, "zero_grad", False, True)
    wanted = alone.run("torch", RUN, None, "nothing", *given)
    for found in worlds.get(setting).call(RUN, "dp", "nothing", *given):
        same(found, wanted)


@pytest.mark.parametrize(("setting", "zero"), [("sim-torch", 3), ("torch-2", 1), ("torch-2", 3)])
def test_a_step_on_values_that_are_given_is_one_devices(setting: str, zero: int, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("torch", "tests.keras.loops:stateless", None, 0)
    for found in worlds.get(setting).call("tests.keras.loops:stateless", "dp", zero):
        same(found, wanted)


WAYS = ("parameters", "variables", "norm", "views", "set", "derived", "own apply", "own gradients")
CLIPPED = [(kind, zero, by) for kind, zero in (*(("dp", zero) for zero in range(4)), *SIMULATED[3:]) for by in WAYS]


@pytest.mark.parametrize(("kind", "zero", "by"), each_value(CLIPPED, lambda row: (row[:2], (row[0] == "dp", row[2]))))
def test_gradients_are_clipped_by_norms_of_whole_variables(
    kind: str, zero: int, by: str, alone: Alone, worlds: Worlds
) -> None:
    program = "tests.keras.loops:clipped"
    wanted = alone.run("torch", program, None, zero, by)
    assert min(wanted["norms"]) > 0.1
    for setting in ("torch-2" if kind == "dp" else "torch-4", "sim-torch"):
        for found in worlds.get(setting).call(program, kind, zero, by):
            same(found, wanted)


def test_what_torch_has_frozen_stays_so_where_layouts_are_found(worlds: Worlds) -> None:
    assert worlds.get("torch-2").call("tests.keras.loops:frozen_and_moved") == [(True, False)] * 2


@pytest.mark.parametrize(("zero", "by"), [(0, "layers"), (0, "parameters"), (1, "layers"), (3, "layers")])
def test_layers_may_become_trainable_amid_a_loop(zero: int, by: str, alone: Alone, worlds: Worlds) -> None:
    program = "tests.keras.loops:thawed"
    wanted = alone.run("torch", program, None, zero, by)
    for found in worlds.get("torch-2").call(program, "dp", zero, by):
        same(found, wanted)


def test_gradients_of_gradients_are_one_devices_in_the_simulator(worlds: Worlds) -> None:
    assert worlds.get("sim-torch").call("tests.keras.loops:penalized") == [""]


def test_gradients_of_which_more_are_to_be_made_are_refused(worlds: Worlds) -> None:
    for said in worlds.get("torch-2").call("tests.keras.loops:penalized"):
        assert "create_graph=True) of a variable was called in a loop of your own" in said


@pytest.mark.parametrize("setting", ["torch-2", "horovod-2", "sim-torch"])
def test_what_two_models_share_is_averaged_once(setting: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("torch", "tests.keras.loops:two_heads", None)
    for found in worlds.get(setting).call("tests.keras.loops:two_heads", "dp"):
        same(found, wanted)


def test_a_part_of_a_graph_has_no_loop_of_its_own(worlds: Worlds) -> None:
    assert worlds.get("torch-2").call("tests.keras.loops:is_prepared_within_a_graph") == [False, False]
