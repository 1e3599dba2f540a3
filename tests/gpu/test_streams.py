"""What is on its way is waited for where it is used, and its memory is used again behind that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.device import ON_GPU, OVER_GLOO, TOLERANCE, needs, start
from tests.gpu.results import STEPS
from tests.parity.compare import assert_same_values
from unidist.testing.processes import ProcessWorld

PROGRAMS = "tests.gpu.streams"
# Two ranks on one GPU, over the host; two over NCCL.
WORLDS = ["two", pytest.param("pair", marks=needs(2))]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> ProcessWorld:
    found: ProcessWorld = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def blocking() -> Any:
    """Two ranks on one GPU, whose program waits for each kernel."""
    env = {**OVER_GLOO, "CUDA_LAUNCH_BLOCKING": "1"}
    with ProcessWorld(2, env=env, setup=start, setup_args=(True,), timeout=300) as found:
        yield found


@pytest.mark.parametrize("zero", range(4))
def test_streams_that_are_held_up_compute_the_same(zero: int, alone: ProcessWorld, world: ProcessWorld) -> None:
    (wanted,) = alone.call(f"{PROGRAMS}:train", None)
    undisturbed = world.call(f"{PROGRAMS}:train", zero)
    for found, other in zip(world.call(f"{PROGRAMS}:train", zero, True), undisturbed, strict=True):
        assert found.buckets >= 5
        assert found.launched["launch"] == found.launched["finish"] == found.buckets * STEPS
        assert found.held_up["launch"] == found.held_up["finish"] == found.buckets * STEPS // 2
        if zero:
            assert found.held_up["unit's start"] >= STEPS
        assert_same_values(found.weights, other.weights, TOLERANCE if ON_GPU else 0.0)
        assert_same_values(found.weights, wanted.weights, TOLERANCE)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_bucket_is_used_again_behind_its_wait(cut: bool, world: ProcessWorld) -> None:
    for found, wanted in world.call(f"{PROGRAMS}:reuse", cut):
        assert found == wanted


@pytest.mark.parametrize("zero", [0, 3])
def test_kernels_that_are_waited_for_compute_the_same(zero: int, two: ProcessWorld, blocking: ProcessWorld) -> None:
    wanted = two.call(f"{PROGRAMS}:train", zero)
    for found, other in zip(blocking.call(f"{PROGRAMS}:train", zero), wanted, strict=True):
        assert (found.blocking, other.blocking) == ("1", None)
        assert_same_values(found.weights, other.weights, TOLERANCE if ON_GPU else 0.0)
