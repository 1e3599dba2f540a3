"""Installs what unidist adds to Keras, for the Keras backend that runs."""

from __future__ import annotations

import importlib

import keras

from unidist.backends import registry
from unidist.keras import clearing, files, loading, making

_ENGINES = {
    "torch": "unidist.keras.explicit",
    "jax": "unidist.keras.partitioned",
    "tensorflow": "unidist.keras.dtensor",
}
# Keras backends that another backend of unidist serves by another engine.
_ENGINES_OF = {("tensorflow", "horovod"): "unidist.keras.replicated"}


def engine() -> str | None:
    """The package of the engine for the Keras backend that runs and the backend in use; None where there is none."""
    name = keras.config.backend()
    used = registry.current().name if registry.has_current() else ""
    return _ENGINES_OF.get((name, used)) or _ENGINES.get(name)


def install() -> None:
    """Adds the hooks of this Keras backend's engine, once."""
    loading.install()
    making.install()
    clearing.install()
    files.install()
    if (found := engine()) is not None:
        importlib.import_module(f"{found}.install").install()


def align_seeds() -> None:
    """Lets all processes draw the same implicit seeds from here on: rank 0's."""
    if (found := engine()) is not None:
        importlib.import_module(f"{found}.install").align_seeds()
