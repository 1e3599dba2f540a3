"""Attributes of the user's own models, layers, losses, metrics and optimizers, in the simulator: all ranks have the one
object, and each has its own attributes on it, as each process has. So it is with what a call of Keras's own layers
writes, and reads again.

A rank that goes on finds them as it has left them. The program, outside of steps, has those of the first rank. What it
changes there is changed for all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from keras import Layer, Loss, Metric

from unidist.keras.compat import BaseOptimizer, DropoutRNNCell, backend
from unidist.keras.known import is_of_either
from unidist.keras.torch import context
from unidist.keras.torch.world import RankWorld

_CONTAINERS = (list, dict, set, collections.deque)
_SHARED = (backend.Variable, BaseOptimizer)
_NONE: frozenset[str] = frozenset()

Held = list[dict[str, Any]]


class PerRank:
    """The attributes that the ranks of the simulator have on some objects.

    Args:
        world: the ranks. The program has what the first one has.
    """

    def __init__(self, world: RankWorld) -> None:
        self._world = world
        # With the names in a user's class, or None where it is Keras's, and those that Keras's own calls write.
        self._objects: list[tuple[Any, frozenset[str] | None, frozenset[str]]] = []
        self._held: dict[int, Held] = {}
        self._left: list[dict[str, tuple[Any, ...]]] = []
        self._kept: Held = []  # keeps what `_left` knows by its id
        self._shown = world.ranks[0]

    @contextlib.contextmanager
    def apart(self, objects: Iterable[Any]) -> Iterator[None]:
        """Inside the ranks run."""
        if not self._world.runs_several or context.frame() is not None:
            yield
            return
        self._follow(objects)
        self._begin()
        try:
            with self._world.backend.calling_at_turns(self._turn):
                yield
        finally:
            self._turn(self._world.ranks[0])
            self._kept = self._now()
            self._left = [{name: _content(value) for name, value in own.items()} for own in self._kept]

    def _follow(self, objects: Iterable[Any]) -> None:
        found = {id(one): one for one in objects}
        if list(found) != [id(one) for one, *_ in self._objects]:
            self._objects = [(one, _names_of(one), _written(one)) for one in found.values()]
            self._held, self._left, self._kept = {}, [{} for _ in found], [{} for _ in found]

    def _turn(self, rank: int) -> None:
        """A rank goes on."""
        if rank == self._shown or rank not in self._held:
            return
        self._held[self._shown] = self._now()
        for (one, *_), before, own in zip(self._objects, self._held[self._shown], self._held[rank], strict=True):
            attributes = vars(one)
            for name in before.keys() - own.keys():
                del attributes[name]
            attributes.update(own)
        self._shown = rank

    def _begin(self) -> None:
        now = self._now()
        for rank in self._world.ranks:
            held = self._held.setdefault(rank, [{} for _ in now])
            for own, found, left in zip(held, now, self._left, strict=True):
                for name in left.keys() - found.keys():
                    own.pop(name, None)
                for name, value in found.items():
                    if rank == self._shown:
                        own[name] = value
                    elif left.get(name) != _content(value):
                        own[name] = _copied(value)

    def _now(self) -> Held:
        return [
            {
                name: value
                for name, value in vars(one).items()
                if name in written
                or (names is not None and (name in names or name[0] != "_") and not _is_shared(value))
            }
            for one, names, written in self._objects
        ]


def with_own(things: Iterable[Any]) -> list[Any]:
    """Those, of layers, losses, metrics and optimizers, on which ranks have attributes of their own."""
    kinds = (Layer, Loss, Metric, BaseOptimizer)
    own = [x for x in things if isinstance(x, kinds) and (not is_of_either(type(x)) or _written(x))]
    return list({id(x): x for x in own}.values())


def _written(layer: Any) -> frozenset[str]:
    """What a call of Keras's writes on its layer and reads again, with other layers' weights fetched in between."""
    if isinstance(layer, DropoutRNNCell):
        return frozenset(("_dropout_mask", "_recurrent_dropout_mask"))
    mode = getattr(layer, "_remat_mode", None)
    return frozenset(("activation",)) if mode is not None and mode.mode == "activations" else _NONE


def _names_of(thing: Any) -> frozenset[str] | None:
    kind: Any = type(thing)
    return None if is_of_either(kind) else _names(kind)


@functools.cache
def _names(kind: Any) -> frozenset[str]:
    """Those that the methods of a class of the user's have in them: private ones beside are Keras's."""
    own = itertools.takewhile(lambda one: not is_of_either(one), kind.__mro__)
    codes = [
        found.__code__
        for one in own
        for value in vars(one).values()
        if isinstance(found := getattr(value, "__wrapped__", value), FunctionType)
    ]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names, (text for text in code.co_consts if isinstance(text, str)))
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return frozenset(names)


def _is_shared(value: Any) -> bool:
    """Whether ranks have one together: what Keras keeps the shards of, and functions."""
    return callable(value) or isinstance(value, (*_SHARED, torch.nn.Parameter))


def _copied(value: Any) -> Any:
    """A rank's own of what is written in place."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, _CONTAINERS) or any(map(_is_shared, _members(value))):
        return value
    made = copy.copy(value)
    for key, member in [] if isinstance(value, set) else _items(value):
        # Past Keras's containers, which would look for layers in it.
        _base(made).__setitem__(made, key, _copied(member))
    return made


def _base(value: Any) -> Any:
    return next(kind for kind in _CONTAINERS if isinstance(value, kind))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _content(value: Any) -> tuple[Any, ...]:
    """Another one when an attribute is assigned, or what is in it."""
    entries = _members(value) if isinstance(value, _CONTAINERS) else ()
    version = (value._version,) if isinstance(value, torch.Tensor) and not value.is_inference() else ()
    return (id(value), *version, *map(_content, entries))
