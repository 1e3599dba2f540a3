"""Notices what a user may change of a model between two steps.

Such are its layers, and attributes by which they choose what to do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import keras

from unidist.keras.layer_facts import is_of_either, is_of_keras

# What such attributes hold: a mode, the number of a phase, a name, a function. A float, as a rate, chooses nothing.
_CHOOSING = (bool, int, str)
# Methods of a model that run outside of its call.
_NOT_IN_CALLS = frozenset(["__init__", "build", "train_step", "test_step", "predict_step", "get_config", "from_config"])
# unidist's own; what a task has compiled to generate with; kernels that a layer has besides (rules.py).
_FOLLOWED = re.compile("^_unidist|_function$|lora|quantiz")
# Set by Keras or by unidist as a layer is built, called, trained and placed.
_NOT_CHOSEN = frozenset(
    [
        *("call", "build", "quantize", "built", "training"),
        *("_called", "_trainable", "_input_spec", "_path", "_parent_path"),
    ]
)


def attributes(layer: Any) -> dict[str, Any]:
    """Returns the attributes of a layer by which its call may choose.

    What a model of Keras's was compiled with is none of it.
    """
    kind: Any = type(layer)
    if _is_of_either(kind):
        # Its private attributes are Keras's, which sets them as it builds and calls the layer.
        given = () if isinstance(layer, keras.Model) else (item for item in vars(layer).items() if item[0][0] != "_")
    else:
        read = _read_in_calls(kind) if isinstance(layer, keras.Model) else None
        given = (item for item in vars(layer).items() if read is None or item[0] in read)
    return {
        name: value
        for name, value in given
        if (isinstance(value, _CHOOSING) or callable(value)) and name not in _NOT_CHOSEN and not _FOLLOWED.search(name)
    }


_is_of_either = functools.cache(is_of_either)


@functools.cache
def _read_in_calls(kind: Any) -> frozenset[str]:
    """Returns the names that the methods of a user's model read.

    Those that its call uses for nothing are left out: numbers that its train_step counts choose nothing in its call.
    """
    own = itertools.takewhile(lambda one: not is_of_either(one), kind.__mro__)
    methods = {name: value for one in own for name, value in vars(one).items() if name not in _NOT_IN_CALLS}
    codes = [inspect.unwrap(value).__code__ for value in methods.values() if isinstance(value, FunctionType)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return frozenset(names)


def key(subject: Any) -> tuple[Any, ...]:
    """The attributes of what is the user's own, to tell calls apart; () of Keras's."""
    if is_of_keras(type(subject)):
        return ()
    return tuple(
        (name, value if isinstance(value, _CHOOSING) else _Itself(value)) for name, value in attributes(subject).items()
    )


class _Itself:
    """Equal to itself alone; kept, so that nothing else can be where it was in memory."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class Looked:
    """Layers as they were when they were last looked at."""

    def __init__(self) -> None:
        # id -> the layer, which keeps its id, and its attributes
        self._seen: dict[int, tuple[Any, dict[str, Any]]] = {}
        # (a layer's attributes, name, the function that it calls), such as an activation
        self._functions: list[tuple[dict[str, Any], str, Any]] = []

    def changed(self, layers: Iterable[Any]) -> list[Any]:
        """Returns a model's layers that are new, or have other attributes than before."""
        before = self._seen
        self.note(layers)
        now = self._seen.values()
        return [one for one, own in now if id(one) not in before or not _are_same(before[id(one)][1], own)]

    def call_other_functions(self) -> bool:
        """Returns whether a layer that was looked at calls another function now. Cheap: asked at each step."""
        return any(held.get(name) is not value for held, name, value in self._functions)

    def note(self, layers: Iterable[Any]) -> None:
        """These layers, as they are now, are what will be compared."""
        self._seen = {id(layer): (layer, attributes(layer)) for layer in layers}
        self._functions = [
            (vars(layer), name, value)
            for layer, own in self._seen.values()
            for name, value in own.items()
            if isinstance(value, FunctionType)
        ]


def _are_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(_is_same(before[name], value) for name, value in now.items())


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(new, _CHOOSING) and type(old) is type(new) and bool(old == new))
