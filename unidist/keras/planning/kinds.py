"""Kinds: layers that behave alike have one number.

Two layers are of one kind if they are of one class and hold equal attributes, alike layers and variables of equal
shapes; names, places in the model and random seeds aside. What cannot be compared is like nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from unidist.keras.layers import children
from unidist.keras.patching.layer_calls import ENTRANCES

# What concerns variables alone and no path between layers.
_ON_VARIABLES = (keras.initializers.Initializer, keras.constraints.Constraint, keras.regularizers.Regularizer)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type)


class Kinds:
    """Numbers of kinds, of one model's layers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of: dict[int, int] = {}

    def of(self, layer: Any) -> int:
        found = self._of.get(id(layer))
        if found is None:
            kind = (
                type(layer),
                tuple((name, self.described(value)) for name, value in sorted(_own(layer)) if _counts(name)),
                tuple((tuple(v.shape), v.dtype, v.trainable) for v in layer.variables),
                str(layer.dtype_policy.name),
                tuple(self.of(child) for child in children(layer)),
            )
            found = self._of[id(layer)] = self._numbers.setdefault(kind, len(self._numbers))
        return found

    def described(self, value: Any) -> Any:
        """Something that is equal for equal values and can be hashed."""
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (keras.layers.Layer, keras.Variable, keras.random.SeedGenerator)):
            # Layers and variables count where they are tracked; a seed changes no path.
            return type(value)
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.described(x) for x in value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self.described(x) for x in value)
        if isinstance(value, dict):
            return type(value), tuple((self.described(k), self.described(x)) for k, x in value.items())
        if isinstance(value, _ON_VARIABLES):
            return type(value)
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return type(value), tuple(self.described(getattr(value, field.name)) for field in fields)
        return type(value), id(value)


def _own(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields a layer's attributes but for unidist's own.

    A call that stands before its class's, as a runner's does, is that of its class.
    """
    for name, value in vars(layer).items():
        if name.startswith("_unidist"):
            continue
        if name not in ENTRANCES or getattr(inspect.unwrap(value), "__func__", None) is not getattr(type(layer), name):
            yield name, value


@functools.cache
def _of_every_layer() -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer()))


def _counts(name: str) -> bool:
    return name not in _of_every_layer()
