"""The torch backend and Keras on a GPU: placement, collectives, training, what a step costs. One GPU is enough.

Never run on GPUs so far. Two ranks share the first GPU, over gloo; NCCL is called in a world of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu import programs
from tests.gpu.programs import DEVICE, ON_GPU
from tests.parity.compare import assert_same_logs, assert_same_values
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, MODEL_2
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.processes import ProcessWorld

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

# Sums of atomics come in any order on a GPU.
TOLERANCE = 1e-4 if ON_GPU else 1e-5
ENVIRONMENT = {"KERAS_BACKEND": "torch", "KERAS_TORCH_DEVICE": None, "CUDA_VISIBLE_DEVICES": "0"}
OVER_GLOO = {**ENVIRONMENT, "UNIDIST_TORCH_TRANSPORT": "gloo"}
OWN = "cuda:0" if ON_GPU else "cpu"
ONE = Spec("data", (("data", 1),))
PROGRAMS = "tests.gpu.programs"


def process(joins: bool | None = None) -> ProcessWorld:
    """A process of its own: new, since one that is forked from another cannot use CUDA if that has looked for it."""
    setup: Any = {} if joins is None else {"setup": programs.start, "setup_args": (joins,)}
    return ProcessWorld(1, launcher=None, env=ENVIRONMENT, timeout=300, **setup)


@pytest.fixture(scope="module")
def alone() -> Iterator[ProcessWorld]:
    """Keras alone, on the device."""
    with process(joins=False) as found:
        yield found


@pytest.fixture(scope="module")
def one() -> Iterator[ProcessWorld]:
    """A world of one."""
    with process(joins=True) as found:
        yield found


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessWorld]:
    """Two ranks on one GPU."""
    with ProcessWorld(2, env=OVER_GLOO, setup=programs.start, setup_args=(True,), timeout=300) as found:
        yield found


# placement ------------------------------------------------------------------------------------------------------------


def test_everything_is_on_the_ranks_device_but_seeds(two: ProcessWorld) -> None:
    for found in two.call(f"{PROGRAMS}:places"):
        assert found.pop("seeds") == "cpu"
        assert found.pop("keras") == DEVICE
        assert set(found.values()) == {OWN}


def test_batches_come_to_the_device_before_the_step(two: ProcessWorld) -> None:
    assert two.call(f"{PROGRAMS}:batches") == [{DEVICE}] * 2


# collectives ----------------------------------------------------------------------------------------------------------


class TestOverGloo(ConformanceSuite):
    """All laws, for two ranks on one GPU."""

    backend = "torch"
    world = f"{PROGRAMS}:world"
    processes = 2
    env = OVER_GLOO
    timeout = 300.0


def test_each_primitive_of_nccl_takes_each_dtype() -> None:
    with process() as found:
        assert found.call(f"{PROGRAMS}:call_nccl") == [[]]


def test_a_group_of_nccl_alone_gets_gloo_beside_it() -> None:
    with process() as found:
        assert found.call(f"{PROGRAMS}:join_a_group_of_nccl_alone") == [
            ("cpu:gloo,cuda:nccl" if ON_GPU else "cpu:gloo,cuda:gloo", 3.0)
        ]


# training -------------------------------------------------------------------------------------------------------------

CASES = ("mlp_ragged_adam", "tagger", "conv_norm", "mlp_clipped")


def assert_trained_as_one_device(found: Any, wanted: Any) -> None:
    assert_same_values(found.start, wanted.start, 0.0)
    assert_same_logs(found.logs, wanted.logs, TOLERANCE)
    assert_same_values(found.weights, wanted.weights, TOLERANCE)
    assert_same_logs([found.evaluate], [wanted.evaluate], TOLERANCE)
    assert_same_values(found.predict, wanted.predict, TOLERANCE)


@pytest.mark.parametrize(
    "spec", [*(replace(DATA_2, zero=zero) for zero in range(4)), MODEL_2], ids=lambda spec: spec.name
)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_device(case: str, spec: Spec, alone: ProcessWorld, two: ProcessWorld) -> None:
    (wanted,) = alone.call("tests.parity.train:train", case, None)
    for found in two.call("tests.parity.train:train", case, spec):
        assert_trained_as_one_device(found, wanted)
        assert sum(sent for _, sent in found.traffic.values()) > 0


def test_sequences_in_parts_train_as_one_device(alone: ProcessWorld, two: ProcessWorld) -> None:
    (wanted,) = alone.call(f"{PROGRAMS}:train_in_parts", None)
    for found in two.call(f"{PROGRAMS}:train_in_parts", MODEL_2):
        assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_a_compiled_model_trains_as_one_that_is_not(alone: ProcessWorld, one: ProcessWorld) -> None:
    (wanted,) = alone.call("tests.parity.train:train", "mlp_ragged_adam", None)
    (found,) = one.call("tests.parity.train:train", "mlp_ragged_adam", ONE, jit_compile=True)
    assert_trained_as_one_device(found, wanted)


# what a step costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
def test_a_warm_step_waits_for_nothing(zero: int, one: ProcessWorld) -> None:
    one.call(f"{PROGRAMS}:step_without_waits", zero)


@pytest.mark.parametrize("zero", range(4))
def test_fifty_steps_hold_no_more_than_ten(zero: int, one: ProcessWorld) -> None:
    ((few, many),) = one.call(f"{PROGRAMS}:memory", zero, 50 if ON_GPU else 12)
    assert many == few


def test_fused_adam_updates_as_kerass(one: ProcessWorld) -> None:
    ((found, taken),) = one.call(f"{PROGRAMS}:adam", True)
    ((wanted, none),) = one.call(f"{PROGRAMS}:adam", False)
    assert taken > 0
    assert none == 0
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=1e-6)
