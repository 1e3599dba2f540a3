"""One device, four virtual devices, and two processes of two devices each: started once, called by every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.keras.jax import worlds
from unidist.testing.processes import ProcessWorld


@pytest.fixture(scope="session")
def one() -> Iterator[ProcessWorld]:
    with ProcessWorld(
        1, launcher=None, env=worlds.environment(), setup=worlds.one_device, timeout=200, preload=worlds.PRELOAD
    ) as world:
        yield world


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessWorld]:
    with ProcessWorld(
        1,
        launcher=None,
        env=worlds.environment(),
        setup=worlds.virtual,
        setup_args=(4,),
        timeout=200,
        preload=worlds.PRELOAD,
    ) as world:
        yield world


@pytest.fixture(scope="session")
def pair() -> Iterator[ProcessWorld]:
    with ProcessWorld(
        2,
        launcher="jax",
        env=worlds.environment(),
        setup=worlds.joined,
        setup_args=(2,),
        timeout=200,
        preload=worlds.PRELOAD,
    ) as world:
        yield world
