"""Processes that read other data than the others get an error, and generators that can be shared are."""

from __future__ import annotations

import pytest

from tests.parity.worlds import Worlds

pytestmark = pytest.mark.processes

PLACES = ["torch-2", "jax-2x2"]


@pytest.mark.parametrize("setting", [*PLACES, "tensorflow-2x2", "horovod-2-tensorflow"])
def test_a_generator_without_a_seed_is_told(setting: str, worlds: Worlds) -> None:
    world = worlds.get(setting)
    for told, _ in world.call("tests.keras.views:fitted", None):
        assert "batch 0 of Shuffled is not the same on all processes" in told
        assert "Give shuffles and generators a seed" in told
    losses = [loss for told, loss in world.call("tests.keras.views:fitted", 5) if not told]
    assert len(losses) == 2
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("setting", PLACES)
def test_a_loader_that_shuffles_reads_the_same_on_all(setting: str, worlds: Worlds) -> None:
    """Whichever backend Keras runs on."""
    losses = worlds.get(setting).call("tests.keras.views:of_a_loader")
    assert losses[0] == losses[1] > 0
