"""The simulator's ranks are JAX's virtual devices where Keras runs on JAX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.keras.jax import worlds
from unidist.testing.processes import ProcessWorld

COUNTING = "tests.keras.jax.counting"


@pytest.fixture
def fresh() -> Iterator[ProcessWorld]:
    with ProcessWorld(1, launcher=None, env=worlds.environment(), timeout=100) as world:
        yield world


@pytest.mark.parametrize("when", ["nothing is imported", "jax is imported", "keras is imported"])
def test_devices_are_counted_before_jax_starts(fresh: ProcessWorld, when: str) -> None:
    count, imported = fresh.call(f"{COUNTING}:counted", when)[0]
    assert count == 4
    assert imported == (when != "nothing is imported")


def test_too_few_devices_are_refused_once_jax_runs(fresh: ProcessWorld) -> None:
    text = fresh.call(f"{COUNTING}:started_before", 2)[0]
    assert "JAX has started with 2" in text
    assert "before the first JAX or Keras operation" in text


def test_some_of_many_devices_are_taken(fresh: ProcessWorld) -> None:
    assert fresh.call(f"{COUNTING}:started_before", 8)[0] == "on 4 of 8"
