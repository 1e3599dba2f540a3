"""Finds where code of the user's may write: attributes of objects, variables of closures, globals."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from keras import Layer, Loss, Metric

from unidist.keras.layer_facts import is_of_either
from unidist.keras.patching.compat import BaseOptimizer, DropoutRNNCell, backend
from unidist.keras.torch.step.writable import CONTAINERS, items

NONE: frozenset[str] = frozenset()
_KINDS = (Layer, Loss, Metric, BaseOptimizer)
_SHARED = (backend.Variable, BaseOptimizer, torch.nn.Parameter, ModuleType, type)
_LIBRARIES = sys.stdlib_module_names | {"torch", "keras", "keras_hub", "unidist"}
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Place:
    """Names values.

    Attributes:
        owner: the object, the cell of a closure or the module's globals.
        path: how it was reached, alike on all ranks.
        values: by their names.
        names: those that count; None: all.
        written: those that count whatever they are.
        is_open: whether all public names count too.
    """

    owner: Any
    path: tuple[Any, ...]
    values: MutableMapping[str, Any]
    names: frozenset[str] | None
    written: frozenset[str] = NONE
    is_open: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Names the place. Functions of one module read other globals of it."""
        return id(self.owner), None if self.is_open else self.names

    def counted(self) -> dict[str, Any]:
        """Gives the values of the names that count."""
        own, names = self.values, self.names
        if names is None:
            return dict(own)
        if self.is_open:
            return {name: value for name, value in own.items() if name in names or name[0] != "_"}
        return {name: own[name] for name in sorted(names) if name in own}

    def now(self) -> dict[str, Any]:
        """Gives the values that each rank has for itself."""
        return {name: value for name, value in self.counted().items() if name in self.written or not is_shared(value)}


class _Closed(MutableMapping[str, Any]):
    """Gives what a cell of a closure holds one name."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(("it",) if len(self) else ())

    def __len__(self) -> int:
        try:
            _ = self._cell.cell_contents
        except ValueError:
            return 0
        return 1


def is_shared(value: Any) -> bool:
    """Says whether ranks have one together: what Keras keeps the shards of, and functions."""
    return callable(value) or isinstance(value, _SHARED)


def places(roots: Iterable[Any]) -> Iterator[Place]:
    """Finds those that code of the user's reaches from layers, losses, metrics, optimizers and functions."""
    seen: set[Any] = set()
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(root, (k,)) for k, root in enumerate(roots)]
    waiting.reverse()
    while waiting:
        one, path = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found = _behind(one, path)
        for place in _places_of(one, path):
            if place.key not in seen:
                seen.add(place.key)
                yield place
                found += [(value, (*place.path, name)) for name, value in sorted(place.counted().items())]
        waiting += [(value, path) for value, path in reversed(found) if _leads_on(value)]


def _places_of(one: Any, path: tuple[Any, ...]) -> Iterator[Place]:
    """Finds where a thing itself has values."""
    if isinstance(one, FunctionType):
        yield from _of_function(one, path)
    elif isinstance(one, _KINDS):
        kind: Any = type(one)
        written = _written(one)
        if not is_of_either(kind):
            yield Place(one, path, vars(one), _names(kind) | written, written, is_open=True)
        elif written:
            yield Place(one, path, vars(one), written, written)
    elif _is_object(one):
        yield Place(one, path, vars(one), None)


def _of_function(function: FunctionType, path: tuple[Any, ...]) -> Iterator[Place]:
    for k, cell in enumerate(function.__closure__ or ()):
        yield Place(cell, (*path, "cell", k), _Closed(cell), None)
    if names := _globals(function.__code__):
        yield Place(function.__globals__, (*path, "globals"), function.__globals__, names)


def _behind(one: Any, path: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    found: list[Any] = []
    if isinstance(one, (*CONTAINERS, tuple)):
        return [(value, (*path, name)) for name, value in items(one)]
    if isinstance(one, functools.partial):
        found += [one.func, *one.args, *one.keywords.values()]
    elif isinstance(one, MethodType):
        found += [one.__func__, one.__self__]
    elif not isinstance(one, FunctionType):
        kind: Any = type(one)
        found += functions_of(kind)
        if isinstance(one, _KINDS):
            found += [value for name, value in vars(one).items() if callable(value) or name in _HOOKS]
        if isinstance(one, Layer) and len(path) > 1:
            found += one._flatten_layers(include_self=False)
    return [(value, (*path, "behind", k)) for k, value in enumerate(found)]


def _leads_on(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return not _is_of_library(value)
    return isinstance(value, (*CONTAINERS, tuple, MethodType, functools.partial, *_KINDS)) or _is_object(value)


def _is_object(value: Any) -> bool:
    """Says whether it is of a class of the user's, with attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, _SHARED) and not _is_of_library(type(value))


def _is_of_library(thing: Any) -> bool:
    """Says whether a class or a function is of what is installed, and keeps what it has by itself."""
    return _is_installed(str(thing.__module__))


@functools.cache
def _is_installed(module: str) -> bool:
    home = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return module.partition(".")[0] in _LIBRARIES or not _INSTALLED.isdisjoint(Path(home).parts)


def _written(thing: Any) -> frozenset[str]:
    """Names what a call of Keras's writes on its layer and reads again, with weights fetched in between."""
    if isinstance(thing, DropoutRNNCell):
        return frozenset(("_dropout_mask", "_recurrent_dropout_mask"))
    mode = getattr(thing, "_remat_mode", None)
    return frozenset(("activation",)) if mode is not None and mode.mode == "activations" else NONE


@functools.cache
def functions_of(kind: type) -> tuple[FunctionType, ...]:
    """Finds those that classes of the user's define."""
    own = itertools.takewhile(lambda one: not is_of_either(one) and not _is_of_library(one), kind.__mro__)
    return tuple(found for one in own for value in vars(one).values() for found in _function(value))


def _function(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType):
        yield value


@functools.cache
def _names(kind: type) -> frozenset[str]:
    codes = itertools.chain.from_iterable(_codes(function.__code__) for function in functions_of(kind))
    return frozenset(
        itertools.chain.from_iterable(
            (*code.co_names, *(text for text in code.co_consts if isinstance(text, str))) for code in codes
        )
    )


@functools.cache
def _globals(code: CodeType) -> frozenset[str]:
    return frozenset(
        step.argval for one in _codes(code) for step in dis.get_instructions(one) if step.opname.endswith("_GLOBAL")
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
