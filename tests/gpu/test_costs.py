"""What a step on a GPU waits for and leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.device import ON_GPU, TOLERANCE
from unidist.testing.processes import ProcessWorld

PROGRAMS = "tests.gpu.costs"


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
