"""Activations: the tensors that a step keeps for its backward, seen in runs on a few rows."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import keras

from unidist.keras.patching.compat import is_float_dtype, is_tensor, jax_utils, tree
from unidist.planner.facts import Activation, Affine, held_at_once

# Activation functions whose derivative is computed from what they give, which the next layer takes and keeps anyway.
_BY_WHAT_THEY_GIVE = frozenset({"linear", "relu", "sigmoid", "tanh", "softmax", "log_softmax", "exponential"})


# A run shows what a step would keep: layers do as in a step.
as_in_a_step: ContextVar[bool] = ContextVar("unidist_as_in_a_step", default=False)


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """`behind`: where the tensor has NaN, the candidate that gave such last; else None.

    `total`: the sum of its values, and `source`: the candidate that gave NaN last. Some kernels lose a NaN: torch's
    attention does on some processors. `goes_along`: it is a mask, or numbers, and is behind what the one of its shape
    before it is behind. `stack`: of what a layer with so many stacked kernels computes, that number; else 0.
    `again`: of what backward computes again, the number of the layer; else 0.
    """

    shape: tuple[int, ...]
    dtype: str
    behind: int | None
    total: float | None = None
    source: int | None = None
    goes_along: bool = False
    stack: int = 0
    again: int = 0

    def after(self, clean: SeenTensor) -> int | None:
        """Returns the candidate whose NaN has changed this tensor, which was `clean` in a run without any."""
        has_changed = None not in (self.total, clean.total) and self.total != clean.total
        return self.source if self.behind is None and has_changed else self.behind


@dataclass
class Seen:
    """Collects what layers take and give, in order, each tensor once.

    With `marking`, tensors with NaN are noted.

    Attributes:
        calls: how many calls of layers were seen: one in which none is seen has no layer inside.
        source: the candidate that gave NaN last.
        read, weights: ids of the variables that are read, and of those whose values are kept as they are, in order,
            where that shows.
    """

    marking: bool = False
    calls: int = 0
    source: int | None = None
    read: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    tensors: list[SeenTensor] = field(default_factory=list)
    _known: dict[int, Any] = field(default_factory=dict)
    _again: int = 0
    _is_again: bool = False

    @contextlib.contextmanager
    def computed_again(self, given: Any) -> Iterator[None]:
        """Notes what a layer is given as kept, and what is kept inside as of a layer that is computed again."""
        if self._is_again:
            yield
            return
        self.add(given)
        self._is_again, before, known = True, len(self.tensors), set(self._known)
        try:
            yield
        finally:
            self._is_again, self._again = False, self._again + 1
            self.tensors[before:] = [replace(one, again=self._again) for one in self.tensors[before:]]
            self._forget(known)

    def _forget(self, known: set[int]) -> None:
        for key in set(self._known) - known:
            del self._known[key]

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
    """Returns whether the derivative of an activation function is computed from what it takes."""
    return activation is not None and getattr(activation, "__name__", "") not in _BY_WHAT_THEY_GIVE


@dataclass(frozen=True, slots=True)
class Seens:
    """Holds what was seen in runs of a model.

    Attributes:
        near, far: of two runs, whose sequences differ in length.
        wide: of one with twice the rows of `near`; None: the first dim alone grows with the rows.
        marked: of runs in which what one layer of each pair gives is NaN.
        read, weights: ids of the variables that are read, and of those whose values are kept as they are, in order.
    """

    near: list[SeenTensor]
    far: list[SeenTensor]
    wide: list[SeenTensor] | None
    marked: list[list[SeenTensor]]
    read: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()

    @property
    def are_alike(self) -> bool:
        runs = (self.near, self.far, self.near if self.wide is None else self.wide)
        ranks = [[len(tensor.shape) for tensor in run] for run in runs]
        return ranks[0] == ranks[1] == ranks[2]

    def behind(self, k: int) -> tuple[int, ...]:
        """The candidates on whose outputs the k-th tensor depends."""
        runs = [run for run in self.marked if len(run) == len(self.near)]
        return tuple(sorted({found for run in runs if (found := run[k].after(self.near[k])) is not None}))


def activations(
    seens: Seens, line: Callable[[float, float], Affine], rows: int, itemsize: Callable[[str], int]
) -> tuple[Activation, ...]:
    """Returns what a step keeps, at any number of rows.

    Args:
        seens: of the runs.
        line: of a length in the one run and in the other, what it is at any length of the sequence.
        rows: of the runs' batches.
    """
    near, far = seens.near, seens.far
    if not seens.are_alike:
        # A model that takes more steps for a longer sequence, as a recurrent one does: one number, none of it cut.
        total = line(*(held_at_once((x.again, prod(x.shape) * itemsize(x.dtype)) for x in run) for run in (near, far)))
        return (Activation((total.times(1 / rows),), 1),)
    found = []
    for k, (one, other) in enumerate(zip(near, far, strict=True)):
        grow = [dim == 0 for dim in range(len(one.shape))]
        if seens.wide is not None:
            grow = [wide > n for n, wide in zip(one.shape, seens.wide[k].shape, strict=True)]
        ends = zip(one.shape, other.shape, grow, strict=True)
        dims = tuple(line(n, longer).times(1 / rows if grows else 1) for n, longer, grows in ends)
        found.append(Activation(dims, itemsize(one.dtype), seens.behind(k), sum(grow), one.stack, one.again))
    return tuple(found)
