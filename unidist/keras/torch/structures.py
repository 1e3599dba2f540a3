"""The leaves of a call's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from unidist.keras.patching.compat import backend, tree


def values(value: Any) -> Any:
    """With the values of Keras's variables, which torch's functions take as well."""
    return mapped(lambda x: x.value if isinstance(x, backend.Variable) else x, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A function on all leaves of a call's arguments."""
    if isinstance(value, dict):
        return {key: mapped(function, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        found = [mapped(function, x) for x in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return function(value)


def of_batch(function: Callable[[Any], Any], batch: Any) -> Any:
    """Applies a function to all leaves of a batch, as Keras's tree does.

    That takes long for a pair of tensors.
    """
    if type(batch) in (tuple, list):
        return type(batch)([of_batch(function, x) for x in batch])
    is_leaf = batch is None or isinstance(batch, (torch.Tensor, np.ndarray))
    return function(batch) if is_leaf else tree.map_structure(function, batch)


class Tensor:
    """Stands for a tensor in a structure that outlives it."""

    def __repr__(self) -> str:
        return "tensor"


A_TENSOR = Tensor()


def tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.flatten(structure) if isinstance(leaf, torch.Tensor)]


def emptied(structure: Any) -> Any:
    """A structure without its tensors: what others are filled into."""
    leaves = [A_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in tree.flatten(structure)]
    return tree.pack_sequence_as(structure, leaves)


def filled(structure: Any, given: Iterator[torch.Tensor]) -> Any:
    """An emptied structure with tensors, in the order of its leaves."""
    leaves = [next(given) if leaf is A_TENSOR else leaf for leaf in tree.flatten(structure)]
    return tree.pack_sequence_as(structure, leaves)
