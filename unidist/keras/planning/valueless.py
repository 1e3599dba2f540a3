"""Makes variables without values, and keeps them waiting.

Keras keeps them in a list, and gives values to all of them where the next stateless scope ends, in whichever model's
`fit` that is. The list alone would keep a planned model of many gigabytes alive until then, and fill it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from unidist.keras.patching.compat import global_state

_LIST = "uninitialized_variables"


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Makes variables without values, but for those of a given one, as an optimizer's rate.

    Keras's scope refuses these.
    """
    owner: Any = next(cls for cls in keras.Variable.__mro__ if "__init__" in vars(cls))
    made = owner.__init__

    def make(variable: Any, initializer: Any, *args: Any, **kwargs: Any) -> None:
        scope = contextlib.nullcontext() if callable(initializer) or isinstance(initializer, str) else _outside()
        with scope:
            made(variable, initializer, *args, **kwargs)

    with keras.StatelessScope(initialize_variables=False):
        owner.__init__ = make
        try:
            yield
        finally:
            owner.__init__ = made


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """As outside of the stateless scope that is in force."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


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
