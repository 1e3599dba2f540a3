"""Installs what unidist adds to Keras, for the Keras backend that runs."""

from __future__ import annotations

import importlib

import keras

_ENGINES = {
    "torch": "unidist.keras.explicit.install",
    "jax": "unidist.keras.partitioned.install",
    "tensorflow": "unidist.keras.dtensor.install",
}


def _engine() -> object:
    return importlib.import_module(_ENGINES[keras.config.backend()])


def install() -> None:
    """Adds the hooks of this Keras backend's engine, once."""
    if keras.config.backend() in _ENGINES:
        _engine().install()  # type: ignore[attr-defined]


def align_seeds() -> None:
    """Lets all processes draw the same implicit seeds from here on: rank 0's."""
    if keras.config.backend() in _ENGINES:
        _engine().align_seeds()  # type: ignore[attr-defined]
