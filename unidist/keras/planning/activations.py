"""Activations: the tensors that a model's innermost layers take and give in a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import keras

from unidist.keras.compat import is_float_dtype, is_tensor, jax_utils, tree
from unidist.planner.facts import Activation, Affine

# Activation functions whose derivative is computed from what they give, which the next layer takes and keeps anyway.
_BY_WHAT_THEY_GIVE = frozenset({"linear", "relu", "sigmoid", "tanh", "softmax", "log_softmax", "exponential"})


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """`behind`: where the tensor has NaN, the candidate that gave such last; else None."""

    shape: tuple[int, ...]
    dtype: str
    behind: int | None


@dataclass
class Seen:
    """What layers take and give, in order, each tensor once. With `marking`, tensors with NaN are noted.

    Attributes:
        calls: how many calls of layers were seen: one in which none is seen has no layer inside.
        source: the candidate that gave NaN last.
    """

    marking: bool = False
    calls: int = 0
    source: int | None = None
    tensors: list[SeenTensor] = field(default_factory=list)
    _known: dict[int, Any] = field(default_factory=dict)

    def add(self, values: Any) -> None:
        tensors = [x for x in tree.flatten(values) if is_tensor(x) and not jax_utils.is_in_jax_tracing_scope(x)]
        self.calls += bool(tensors)
        for tensor in tensors:
            if len(tensor.shape) > 0:
                self._add(tensor)

    def _add(self, tensor: Any) -> None:
        # An id is another tensor's as soon as its own is gone.
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            return
        self._known[id(tensor)] = weakref.ref(tensor)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        marked = self.marking and is_float_dtype(dtype) and bool(keras.ops.any(keras.ops.isnan(tensor)))
        self.tensors.append(SeenTensor(tuple(tensor.shape), dtype, self.source if marked else None))


def keeps_what_it_takes(activation: Callable[..., Any] | None) -> bool:
    """Whether the derivative of an activation function is computed from what it takes."""
    return activation is not None and getattr(activation, "__name__", "") not in _BY_WHAT_THEY_GIVE


def activations(
    near: list[SeenTensor],
    far: list[SeenTensor],
    marked: list[SeenTensor],
    line: Callable[[int, int], Affine],
    rows: int,
    itemsize: Callable[[str], int],
) -> tuple[Activation, ...]:
    """The activations of one row.

    Args:
        near, far: of two runs, whose sequences differ in length. marked: of one in which what pairs cut is NaN.
        line: of a length in the one run and in the other, what it is at any length of the sequence.
        rows: of the runs' batches.
    """
    if [len(tensor.shape) for tensor in near] != [len(tensor.shape) for tensor in far]:
        # A model that takes more steps for a longer sequence, as a recurrent one does: one number, none of it cut.
        total = line(*(sum(prod(x.shape) * itemsize(x.dtype) for x in run) for run in (near, far)))
        return (Activation((total.times(1 / rows),), 1),)
    behind = [tensor.behind for tensor in marked] if len(marked) == len(near) else [None] * len(near)
    return tuple(
        Activation(
            tuple(line(a, b).times(1 / rows if dim == 0 else 1) for dim, (a, b) in enumerate(_dims(one, other))),
            itemsize(one.dtype),
            source,
        )
        for one, other, source in zip(near, far, behind, strict=True)
    )


def _dims(near: SeenTensor, far: SeenTensor) -> list[tuple[int, int]]:
    return list(zip(near.shape, far.shape, strict=True))
