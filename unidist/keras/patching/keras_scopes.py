"""Asks Keras's scopes of a thread at once: each read of a variable would call three functions.

The names of the attributes were read in Keras 3.15 and 3.16. Where one has another name, callers go the long way.
"""

from __future__ import annotations

import functools

from unidist.keras.patching.compat import AutocastScope, StatelessScope, global_state, torch_core

_NAMES = ("stateless_scope", "torch_device", "autocast_scope")


def reads_plainly() -> bool:
    """Returns whether no scope of values, device or dtype changes what a variable reads as."""
    return _are_known() and _is_bare()


def _is_bare() -> bool:
    state = global_state.GLOBAL_STATE_TRACKER  # another object behind each clear_session
    return all(getattr(state, name, None) is None for name in _NAMES)


@functools.cache
def _are_known() -> bool:
    """Returns whether each scope, entered, is seen."""
    found = []
    for scope in (StatelessScope(), torch_core.device_scope("cpu"), AutocastScope("float16")):
        with scope:
            found.append(_is_bare())
    return not any(found)
