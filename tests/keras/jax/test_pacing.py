"""Steps that are dispatched ahead, in this process's record: from their dispatch until they are known to be ready."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.support import flights
from unidist.backends.jax import joining, waiting
from unidist.errors import ProcessLostError
from unidist.keras.jax import pacing

STEP = "train step"


def step() -> None:
    pacing.before_step(STEP)
    pacing.dispatched(STEP, lambda: (jnp.ones(()), None))


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 0 of two sees it."""
    member = joining.Membership(2, 0, 1.0)
    monkeypatch.setattr(joining, "current", lambda: member)


def stands(steps: int) -> list[str]:
    def call() -> None:
        for _ in range(steps):
            step()

    found = flights.since(call)
    assert {entry.what for entry in found} == {"train step of processes 0, 1"}
    return [flights.how(entry) for entry in found]


def test_a_step_ends_where_it_is_known_to_be_ready() -> None:
    with pacing.kept():
        assert stands(4) == ["ended", "ended", "under way", "under way"]
    assert [flights.how(entry) for entry in flights.here().entries[-2:]] == ["ended"] * 2


def test_a_step_whose_others_do_not_come_fails_with_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def lose(x: Any, world: Any, what: str) -> None:
        states.extend(flights.how(entry) for entry in flights.here().entries[-2:])
        raise ProcessLostError("gone")

    monkeypatch.setattr(waiting, "until_done", lose)
    with pytest.raises(ProcessLostError), pacing.kept():
        stands(3)
    assert states == ["waits", "under way"]
    assert [flights.how(entry) for entry in flights.here().entries[-2:]] == ["failed"] * 2
    assert flights.here().open == ()


def test_a_step_that_raises_has_failed() -> None:
    def stumble() -> Any:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"), pacing.kept():
        pacing.dispatched(STEP, stumble)
    assert flights.how(flights.here().entries[-1]) == "failed"


def test_one_process_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "current", lambda: joining.Membership(1, 0, 1.0))
    assert flights.since(step) == []
