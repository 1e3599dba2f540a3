"""Which driver trains Keras models: by the Keras backend that runs, and the adapter in use."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from unidist.backends import registry
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy

# Keras backend -> what trains there, unless the adapter in use has declared another driver.
_DRIVERS = {
    "torch": "unidist.keras.torch",
    "jax": "unidist.keras.jax",
    "tensorflow": "unidist.keras.tensorflow",
}


def driver() -> str | None:
    """The driver's package; None where there is none."""
    name = keras.config.backend()
    return registry.in_use().drivers.get(name) or _DRIVERS.get(name)


def hooks_of(package: str) -> Any:
    """The module of a driver's hooks."""
    return importlib.import_module(f"{package}.hooks")


def rehearsal() -> Any:
    """The module that calls a model as a step does, without values; or why there is none."""
    name = keras.config.backend()
    if driver() != _DRIVERS["torch"]:
        return f"Keras on {name} leaves it to a compiler what is sent"
    return importlib.import_module(f"{driver()}.rehearsal")


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """Raises MeshError or CapabilityError where the driver cannot train by a strategy."""
    if (found := driver()) is not None:
        hooks_of(found).check(strategy, layout_map)


def align_seeds() -> None:
    """Lets all processes draw the same implicit seeds from here on: rank 0's."""
    if (found := driver()) is not None:
        hooks_of(found).align_seeds()
