"""Keras models are not distributed over DTensor: that is said, and nothing trains on one device in silence."""

from __future__ import annotations

import pytest

from tests.visible import WITH_TENSORFLOW
from unidist.testing.processes import ProcessWorld


def refusal() -> str:
    import unidist

    unidist.use("tensorflow", devices=2)
    try:
        unidist.DataParallel()
    except unidist.CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_strategy_is_refused() -> None:
    with ProcessWorld(1, launcher=None, env={"KERAS_BACKEND": "tensorflow", **WITH_TENSORFLOW}, timeout=60) as world:
        assert "arrays and collectives, not models" in world.call(f"{__name__}:refusal")[0]
