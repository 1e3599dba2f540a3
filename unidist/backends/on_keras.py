"""Finds the backend that Keras computes on, in one order for all. Imports no Keras.

First what says so, then KERAS_BACKEND, keras.json, and what is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ORDER = ("torch", "jax", "tensorflow")
# Keras writes this at its first import, whatever it computes on: it says nothing of the user.
_WRITTEN_BY_KERAS = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A Keras backend, and what chose it.

    Attributes:
        is_ours: nothing said it, and there were several.
    """

    name: str
    why: str
    is_ours: bool = False


def runs() -> str:
    """The backend that Keras runs on; "" where it has not been imported."""
    keras = sys.modules.get("keras")
    return keras.config.backend() if keras is not None and hasattr(keras, "config") else ""


def said() -> Choice | None:
    """The backend that Keras runs on already, or that KERAS_BACKEND names."""
    if found := runs():
        return Choice(found, "it is imported")
    named = os.environ.get("KERAS_BACKEND")
    return Choice(named, "KERAS_BACKEND") if named else None


def among(served: Sequence[str]) -> Choice:
    """Chooses where nothing is said: the one of several that keras.json names, else the first installed."""
    configured = _configured()
    if len(served) == 1:
        return Choice(served[0], "the only one that serves")
    if configured in served and _is_installed(configured):
        return Choice(configured, "keras.json", is_ours=True)
    first = next(filter(_is_installed, served), served[0])
    return Choice(first, f"the first installed of {', '.join(served)}", is_ours=True)


def choice() -> Choice:
    """Returns the backend that Keras computes on where all backends are served."""
    return said() or among(ORDER)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _configured() -> str:
    """Returns what keras.json names; "" where there is none, or as Keras has written it by itself."""
    home = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"))
    try:
        found = json.loads((home / "keras.json").read_text())
    except (OSError, ValueError):
        return ""
    return "" if found == _WRITTEN_BY_KERAS or not isinstance(found, dict) else str(found.get("backend", ""))
