"""Copies values of Python's that are written in place, and finds whether they were."""

from __future__ import annotations

import collections
import copy
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

CONTAINERS = (list, dict, set, collections.deque)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
Shared = Callable[[Any], bool]


def copied(value: Any, is_shared: Shared, known: dict[int, Any]) -> Any:
    """Copies what may be written in place. `known`: by their ids, what there are copies of already."""
    if id(value) in known:
        return known[id(value)]
    made = _copied(value, is_shared, known)
    known[id(value)] = made
    return made


def _copied(value: Any, is_shared: Shared, known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, _GENERATORS):
        return copy.deepcopy(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if not isinstance(value, CONTAINERS) or any(map(is_shared, members(value))):
        return value
    made = known[id(value)] = copy.copy(value)
    for key, member in [] if isinstance(value, set) else items(value):
        _Inside(made)[key] = copied(member, is_shared, known)
    return made


def _base(value: Any) -> Any:
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def leaves(values: Any, named: dict[Any, Any]) -> Iterator[tuple[Any, Any, tuple[Any, ...], Any]]:
    """Finds what is in `named`, of these values, and in containers there.

    Gives where it can be replaced, under which name, the path to it, and itself.
    """
    waiting: list[tuple[Any, Any, tuple[Any, ...], Any]] = [
        (values, name, (name,), value) for name, value in named.items()
    ]
    seen: set[int] = set()
    while waiting:
        holder, name, path, value = waiting.pop()
        if isinstance(value, (list, dict, collections.deque)):
            if id(value) not in seen:
                seen.add(id(value))
                inside = _Inside(value)
                waiting += [(inside, key, (*path, key), member) for key, member in items(value)]
        else:
            yield holder, name, path, value


class _Inside:
    """Writes past Keras's containers, which would look for layers in it."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __setitem__(self, name: Any, value: Any) -> None:
        _base(self._container).__setitem__(self._container, name, value)


def content(value: Any) -> tuple[Any, ...]:
    """Gives another one when a name is given another value, or what is in it."""
    entries = members(value) if isinstance(value, CONTAINERS) else ()
    version = (value._version,) if isinstance(value, torch.Tensor) and not value.is_inference() else ()
    return (id(value), *version, *_drawn(value), *map(content, entries))


def _drawn(value: Any) -> tuple[Any, ...]:
    """Says how far a generator of random numbers has come."""
    if isinstance(value, np.random.Generator):
        return (pickle.dumps(value.bit_generator.state),)
    if isinstance(value, np.random.RandomState):
        return (pickle.dumps(value.get_state(legacy=False)),)
    if isinstance(value, random.Random):
        return value.getstate()
    return (bytes(value.get_state().numpy()),) if isinstance(value, torch.Generator) else ()
