"""Optimizers whose `apply` is the user's own: it may look at all gradients at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unidist.keras.layer_facts import overrides
from unidist.keras.patching.compat import BaseOptimizer

_METHODS = ("apply", "_backend_apply_gradients")
_MARK = "_unidist_overridden"


def install(model: Any, given: Callable[..., Any]) -> None:
    """Lets given(optimizer, method, gradients, variables) stand before what a model's optimizers override.

    Those are the one that it was compiled with, those that it holds as attributes, and the ones inside of them. Each is
    given it once.
    """
    for held in (getattr(model, "optimizer", None), *vars(model).values()):
        for one in (held, getattr(held, "inner_optimizer", None)):
            if isinstance(one, BaseOptimizer) and _MARK not in vars(one):
                for name in overridden(one):
                    object.__setattr__(one, name, functools.partial(given, one, getattr(one, name)))
                object.__setattr__(one, _MARK, True)


def overridden(optimizer: Any) -> list[str]:
    """The methods among those that see all gradients which a class of the user's defines."""
    return [name for name in _METHODS if overrides(optimizer, name)]
