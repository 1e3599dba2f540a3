"""Replaces Keras's clear_session, which lets go of what Keras noted; the strategy in force stays.

A model made afterwards in the same scope would train on each device by itself, and nothing would say so.
"""

from __future__ import annotations

from typing import Any

import keras

from unidist.keras.patching.compat import global_state
from unidist.keras.patching.patches import Hook, calling


def hooks() -> tuple[Hook, ...]:
    why = "the strategy in force stays"
    return (Hook(global_state, "clear_session", _clearing, why, imported=True),)


@calling
def _clearing(original: Any, free_memory: bool = True) -> None:
    distribution = keras.distribution.distribution()
    original(free_memory)
    keras.distribution.set_distribution(distribution)
