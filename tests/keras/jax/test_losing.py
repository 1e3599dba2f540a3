"""A process that is killed, or stands still, in the middle of Keras's work: the others say so, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.keras.jax import worlds
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes

LOST = "tests.keras.jax.losing:lost"
# With one device a process NumPy reads by the buffer protocol, which waits in C++.
DEVICES = 1


def world(count: int) -> ProcessWorld:
    return ProcessWorld(
        count,
        launcher="jax",
        env=worlds.environment(),
        setup=worlds.joined,
        setup_args=(DEVICES,),
        timeout=40,
        preload=worlds.PRELOAD,
    )


def test_all_hear_of_process_0_being_killed_in_fit(tmp_path: Path) -> None:
    """It keeps JAX's coordination service, without which JAX aborts the others."""
    with world(3) as three:
        outcomes = three.outcomes(LOST, "killed", 0, "fit", 60.0, str(tmp_path))
    assert outcomes[0].failure is not None
    assert outcomes[0].failure.kind == "ended"
    for outcome in (outcomes[1], outcomes[2]):
        assert outcome.failure is None, outcome.failure
        text, seconds, (kind, at_once) = outcome.value
        assert "another process of the group ended or did not come in time" in text
        assert seconds < 30
        assert kind == "ProcessLostError"
        assert at_once < 10


@pytest.mark.parametrize("entrance", ["fit", "save"])
def test_a_process_that_stands_still_is_waited_for_no_longer_than_the_timeout(entrance: str, tmp_path: Path) -> None:
    timeout = 1.0
    with world(2) as two:
        (text, seconds, (kind, at_once)), _ = two.call(LOST, "still", 1, entrance, timeout, str(tmp_path))
    assert "nothing came for 1 s" in text
    assert timeout <= seconds < 20  # of the 300 that a process waits where nobody says
    assert kind == "ProcessLostError"
    assert at_once < timeout
