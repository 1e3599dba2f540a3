"""What a user may change of a model between two steps: its layers, and attributes by which they choose what to do."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import keras

from unidist.keras.known import is_of_either, is_of_keras

# What such attributes hold: a mode, the number of a phase, a name, a function. A float, as a rate, chooses nothing.
_CHOOSING = (bool, int, str)
# unidist's own; what a task has compiled to generate with; kernels that a layer has besides (rules.py, pairs.py).
_FOLLOWED = re.compile("^_unidist|_function$|lora|quantiz")
# Set by Keras or by unidist as a layer is built, called, trained and placed.
_NOT_CHOSEN = frozenset(["call", "built", "training", "_called", "_trainable", "_input_spec", "_path", "_parent_path"])


def attributes(layer: Any) -> dict[str, Any]:
    """Those of a layer by which its call may choose. What a model of Keras's was compiled with is none of it."""
    if isinstance(layer, keras.Model) and is_of_either(type(layer)):
        return {}
    aside = _NOT_CHOSEN | _of_models() if isinstance(layer, keras.Model) else _NOT_CHOSEN
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in aside and (isinstance(value, _CHOOSING) or callable(value)) and not _FOLLOWED.search(name)
    }


@functools.cache
def _of_models() -> frozenset[str]:
    """What Keras keeps on any model: how it was compiled, and the functions that it has made."""
    return frozenset(vars(keras.Model(name="unidist")))


def key(subject: Any) -> tuple[Any, ...]:
    """The attributes of what is the user's own, to tell calls apart; () of Keras's."""
    if is_of_keras(type(subject)):
        return ()
    return tuple(
        (name, value if isinstance(value, _CHOOSING) else id(value)) for name, value in attributes(subject).items()
    )


class Looked:
    """Layers as they were when they were last looked at."""

    def __init__(self) -> None:
        # id -> the layer, which keeps its id, and its attributes
        self._seen: dict[int, tuple[Any, dict[str, Any]]] = {}
        # (a layer's attributes, name, the function that it calls), such as an activation
        self._functions: list[tuple[dict[str, Any], str, Any]] = []

    def changed(self, layers: Iterable[Any]) -> list[Any]:
        """Those of a model's layers that are new, or have other attributes than before."""
        now = {id(layer): (layer, attributes(layer)) for layer in layers}
        before, self._seen = self._seen, now
        self._functions = [
            (vars(layer), name, value)
            for layer, own in now.values()
            for name, value in own.items()
            if isinstance(value, FunctionType)
        ]
        return [layer for one, (layer, own) in now.items() if one not in before or not _are_same(before[one][1], own)]

    def call_other_functions(self) -> bool:
        """Whether a layer that was looked at calls another function now. Cheap: asked at each step."""
        return any(held.get(name) is not value for held, name, value in self._functions)

    def have_changed(self, layers: Iterable[Any]) -> bool:
        """Whether some of the layers that were looked at have other attributes now, which are noted."""
        found = False
        for layer in layers:
            own = attributes(layer)
            if id(layer) in self._seen and not _are_same(self._seen[id(layer)][1], own):
                self._seen[id(layer)] = (layer, own)
                found = True
        return found


def _are_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    if before.keys() != now.keys():
        return False
    return all(
        value is before[name]
        or (isinstance(value, _CHOOSING) and type(value) is type(before[name]) and value == before[name])
        for name, value in now.items()
    )
