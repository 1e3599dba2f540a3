"""What a rank of two keeps of a model under each stage of ZeRO, and what a step takes beside it, against formulas."""

from __future__ import annotations

import pytest

from tests.gpu.device import ON_GPU, needs
from tests.gpu.results import Held
from unidist.testing.processes import ProcessWorld

PROGRAMS = "tests.gpu.held"
# Stage -> parts of the model's weights in float32: weights, Adam's two slots, gradients.
KEPT = {0: (1.0, 2.0, 1.0), 1: (1.0, 1.0, 0.5), 2: (1.0, 1.0, 0.5), 3: (0.5, 1.0, 0.5)}
# Of unidist/keras/torch: buckets that are cut and under way at once, and bytes that are joined at once.
AT_ONCE, IN_FLIGHT = 2, 100 << 20


def most_made(held: Held, zero: int) -> int:
    """Bytes that a step may make beside what is kept.

    Outputs of layers, with their gradients and what backward makes of them, and the gradients of two layers: one on its
    way to its bucket, and the one that is made meanwhile. Where gradients are cut: one bucket that is filled, and those
    under way, with this rank's part. Stage 1 and 2: units that are joined behind the optimizer. Stage 3: units of three
    layers, each as it is sent and as it is read.
    """
    made = 4 * held.activations + 2 * held.layer
    if zero:
        made += held.buckets + (AT_ONCE + 1) * held.buckets * 3 // 2
    if zero in (1, 2):
        made += min(held.model, IN_FLIGHT + held.units)
    if zero == 3:
        made += 3 * 2 * held.units
    return made


@pytest.fixture(params=["two", pytest.param("pair", marks=needs(2))])
def world(request: pytest.FixtureRequest) -> ProcessWorld:
    found: ProcessWorld = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("zero", range(4))
def test_a_rank_keeps_its_part(zero: int, world: ProcessWorld) -> None:
    for held in world.call(f"{PROGRAMS}:held", zero):
        assert held.bucket_count > 5
        kept = (held.weights, held.slots, held.gradients)
        assert kept == tuple(int(part * held.model) for part in KEPT[zero])
        if ON_GPU:
            # Beside it: scalars, rounding to the allocator's blocks, and the last outputs.
            beside = held.model // 100 + held.units
            assert 0 <= held.allocated - sum(kept) <= beside
            assert held.made <= most_made(held, zero) + beside


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_slots_rest_in_host_memory(zero: int, world: ProcessWorld) -> None:
    for held in world.call(f"{PROGRAMS}:held", zero, "states"):
        weights, slots, gradients = (int(part * held.model) for part in KEPT[zero])
        assert (held.weights, held.slots, held.gradients) == (weights, 0, gradients)
        assert held.on_host == slots
        if ON_GPU:
            assert held.pinned
            beside = held.model // 100 + held.units
            assert 0 <= held.allocated - weights - gradients <= beside
            # An update's turn has one kernel here: Adam's two slots of this one and of the next.
            assert held.made <= max(most_made(held, zero), 4 * held.layer) + beside


def test_what_a_step_may_make_differs_by_stage() -> None:
    """On a GPU, by the sizes there: a stage that kept what it should not would be over the bound of its own."""
    mib = 1 << 20
    sizes = {"units": 16 * mib, "buckets": 32 * mib, "bucket_count": 12, "layer": 16 * mib, "activations": 2 * mib}
    held = Held(384 * mib, weights=0, slots=0, gradients=0, allocated=0, made=0, **sizes)
    most = [int(sum(KEPT[zero]) * held.model) + most_made(held, zero) for zero in range(4)]
    assert most[3] < most[1] == most[2] < most[0]
    assert most[3] < 3 * held.model
