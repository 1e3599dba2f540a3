"""The torch backend and Keras on a GPU: placement, collectives over the host, training. One GPU is enough.

Never run on GPUs so far. Two ranks share the first GPU, over gloo.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.device import DEVICE, OVER_GLOO, OWN, TOLERANCE
from tests.parity.compare import assert_same_logs, assert_same_values
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, MODEL_2
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.processes import ProcessWorld

ONE = Spec("data", (("data", 1),))
PROGRAMS = "tests.gpu.programs"


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


# training -------------------------------------------------------------------------------------------------------------

CASES = ("mlp_ragged_adam", "tagger", "conv_norm", "mlp_clipped")


def assert_trained_as_one_device(found: Any, wanted: Any) -> None:
    assert_same_values(found.start, wanted.start, 0.0)
    assert_same_logs(found.logs, wanted.logs, TOLERANCE)
    assert_same_values(found.weights, wanted.weights, TOLERANCE)
    assert_same_logs([found.evaluate], [wanted.evaluate], TOLERANCE)
    assert_same_values(found.predict, wanted.predict, TOLERANCE)


@pytest.mark.parametrize(
    "spec",
    [*(replace(DATA_2, zero=zero) for zero in range(4)), MODEL_2, replace(DATA_2, zero=1, offload="states")],
    ids=lambda spec: spec.name,
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


def test_replicas_stay_the_same_bits(two: ProcessWorld) -> None:
    first, second = two.call(f"{PROGRAMS}:replicas")
    assert first == second
    assert first[1][-1] < first[1][0]


def test_a_compiled_model_trains_as_one_that_is_not(alone: ProcessWorld, one: ProcessWorld) -> None:
    (wanted,) = alone.call("tests.parity.train:train", "mlp_ragged_adam", None)
    (found,) = one.call("tests.parity.train:train", "mlp_ragged_adam", ONE, jit_compile=True)
    assert_trained_as_one_device(found, wanted)
