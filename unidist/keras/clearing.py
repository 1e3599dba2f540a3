"""Keras's clear_session, which lets go of what Keras has noted, and of the strategy that is in force: that one stays.

A model made afterwards in the same scope would train on each device by itself, and nothing would say so.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras

from unidist.keras.compat import global_state

_originals: dict[str, Any] = {}


def install() -> None:
    """Patches clear_session under every name it was imported by, once."""
    if _originals:
        return
    original = _originals["clear_session"] = global_state.clear_session

    @functools.wraps(original)
    def clear_session(free_memory: bool = True) -> None:
        distribution = keras.distribution.distribution()
        original(free_memory)
        keras.distribution.set_distribution(distribution)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("clear_session") is original:
            module.__dict__["clear_session"] = clear_session
