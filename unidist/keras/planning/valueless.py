"""Waiting: variables that were made without values.

Keras keeps them in a list, and gives values to all of them where the next stateless scope ends, in whichever model's
`fit` that is. The list alone would keep a planned model of many gigabytes alive until then, and fill it.
"""

from __future__ import annotations

import weakref
from typing import Any

from unidist.keras.patching.compat import global_state

_LIST = "uninitialized_variables"


class _IfAlive:
    """In the list in place of a variable: it gets a value if somebody else still has it."""

    def __init__(self, variable: Any) -> None:
        self._variable = weakref.ref(variable)

    def _deferred_initialize(self) -> None:
        variable = self._variable()
        if variable is not None:
            variable._deferred_initialize()


def let_go(model: Any) -> None:
    """From now on the list keeps no variable of the model alive."""
    ours = {id(v) for v in model.variables}
    waiting = global_state.get_global_attribute(_LIST) or []
    waiting[:] = [_IfAlive(v) if id(v) in ours else v for v in waiting]


def leave_without(model: Any) -> None:
    """The model's variables get no values any more."""
    ours = {id(v) for v in model.variables}
    waiting = global_state.get_global_attribute(_LIST) or []
    waiting[:] = [v for v in waiting if id(v) not in ours]
