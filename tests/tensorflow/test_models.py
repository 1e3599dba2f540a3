"""Keras models are not distributed over DTensor in several processes: that is said, and nothing trains alone."""

from __future__ import annotations

import pytest

from tests.visible import WITH_TENSORFLOW
from unidist.testing.processes import ProcessWorld


def refusal() -> str:
    import unidist

    unidist.use("tensorflow", devices=2)
    unidist.initialize()
    try:
        unidist.DataParallel()
    except unidist.CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_strategy_is_refused() -> None:
    with ProcessWorld(2, env={"KERAS_BACKEND": "tensorflow", **WITH_TENSORFLOW}, timeout=120) as world:
        for text in world.call(f"{__name__}:refusal"):
            assert "in 2 processes serves arrays and collectives, not models" in text
