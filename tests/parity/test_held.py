"""What a training step holds at most."""

from __future__ import annotations

import pytest

from tests.parity.worlds import Worlds

pytestmark = pytest.mark.processes


def test_gradients_are_held_once(worlds: Worlds) -> None:
    """In the buckets, into which each is moved when it has come. One of twenty-four is made while the others are there,
    and some hundredths are activations."""
    for gradients, peak in worlds.get("torch-2").call("tests.parity.held:of_gradients", 4):
        assert gradients < peak < 1.1 * gradients
