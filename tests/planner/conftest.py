"""One device and four virtual ones, on JAX: started once, called by every test. The plans themselves are made here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import preloaded
from tests.planner import programs
from tests.visible import QUICK_JAX
from unidist.testing.processes import ProcessWorld

_ENV = {"KERAS_BACKEND": "jax", **QUICK_JAX}


def _world(devices: int | None) -> ProcessWorld:
    return ProcessWorld(
        1,
        launcher=None,
        env=_ENV,
        setup=programs.start,
        setup_args=(devices,),
        timeout=250,
        preload=preloaded.KERAS["jax"],
    )


@pytest.fixture(scope="session")
def one() -> Iterator[ProcessWorld]:
    with _world(None) as world:
        yield world


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessWorld]:
    with _world(4) as world:
        yield world


@pytest.fixture(scope="module", autouse=True)
def keras_backend() -> Iterator[None]:
    """Plans are made in this process, on whichever Keras backend other tests chose; torch where none did."""
    had = os.environ.get("KERAS_BACKEND")
    os.environ.setdefault("KERAS_BACKEND", "torch")
    yield
    if had is None:
        del os.environ["KERAS_BACKEND"]
