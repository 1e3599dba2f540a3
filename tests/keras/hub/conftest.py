"""Models on torch in the simulator, four virtual devices in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import unidist
from tests import preloaded
from unidist.testing.processes import ProcessWorld

# Keras reads the variable when it is imported; no other test shall see it.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "torch")
    import keras

assert keras.config.backend() == "torch"


@pytest.fixture(autouse=True)
def four_devices():
    unidist.use("sim", devices=4)
    return


@pytest.fixture(scope="module", autouse=True)
def distributed_models_go():
    """In the simulator every step, of whatever model, looks at all variables that a program has read and still has."""
    yield
    from tests.keras.hub import zoo

    zoo.planned.cache_clear()


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessWorld]:
    """Two processes on torch, each with one device."""
    from tests.keras.hub import tasks

    with ProcessWorld(
        2,
        env={"KERAS_BACKEND": "torch"},
        setup=tasks.start,
        setup_args=("torch", 2),
        timeout=200,
        preload=preloaded.KERAS["torch"],
    ) as world:
        yield world
