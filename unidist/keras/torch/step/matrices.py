"""Updates that look at whole matrices, as Muon's: one rank computes a matrix, and all get parts.

An update asks for it amid its own code. So each is made twice: first up to where it asks, with what it writes thrown
away, and then, when all owners have computed theirs, with what they have made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from keras import StatelessScope

from unidist import events
from unidist.backends.torch.sharded import ShardedTensor, owners
from unidist.keras.torch.context import Frame
from unidist.propagation.layouts import Cut

Update = Callable[[], None]
# The purpose of what goes to owners and back.
_WHY = "matrices"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in parts, and what is to be computed of its whole."""

    x: ShardedTensor
    compute: Callable[[torch.Tensor], torch.Tensor]


class _Asked(Exception):  # noqa: N818 (no error: it ends an update that is made once more)
    """An update has come to where it needs what a matrix becomes."""

    def __init__(self, matrix: _Matrix) -> None:
        super().__init__()
        self.matrix = matrix


class Asking:
    """Answers an update that asks: it has nothing yet, or what the owner has made.

    Attributes:
        made: the latter, in parts.
    """

    def __init__(self) -> None:
        self.made: torch.Tensor | None = None

    def ask(self, x: ShardedTensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns compute(whole of x), of the shape of x."""
        if self.made is None:
            raise _Asked(_Matrix(x, compute))
        return self.made


def is_in_parts(x: Any) -> bool:
    """Returns whether a matrix is cut so that parts can go to an owner."""
    return type(x) is ShardedTensor and all(isinstance(state, Cut) for state in x.spec.states)


def update(frame: Frame, updates: Sequence[Update], may_ask: Sequence[bool]) -> None:
    """Makes updates, of which some may ask for a whole matrix."""
    asked = [_matrix(frame, one) if asks else None for one, asks in zip(updates, may_ask, strict=True)]
    found: dict[int, ShardedTensor] = {}
    loads: dict[int, float] = {}
    for together in _groups(asked):
        given, costs = [matrix.x for matrix in together.values()], [_cost(matrix.x) for matrix in together.values()]
        functions = [matrix.compute for matrix in together.values()]
        with events.for_purpose(_WHY), torch.no_grad():
            found.update(zip(together, owners.computed(given, functions, costs, loads), strict=True))
    for k, one in enumerate(updates):
        asking = Asking()
        asking.made = found.pop(k, None)
        with frame.asking_for_matrices(None if asking.made is None else asking):
            one()


def _matrix(frame: Frame, one: Update) -> _Matrix | None:
    """Returns what an update asks for, without a trace of it."""
    try:
        with frame.asking_for_matrices(Asking()), StatelessScope():
            one()
    except _Asked as asked:
        return asked.matrix
    return None


def _groups(asked: list[_Matrix | None]) -> list[dict[int, _Matrix]]:
    """Gives those that go together, by their numbers: cut along the same axes, and of one dtype."""
    groups: dict[Any, dict[int, _Matrix]] = {}
    for k, matrix in enumerate(asked):
        if matrix is not None:
            groups.setdefault((id(matrix.x.spec.space), matrix.x.dtype), {})[k] = matrix
    return list(groups.values())


def _cost(x: ShardedTensor) -> float:
    """Says how many multiplications products of a matrix with itself take."""
    return float(min(x.shape)) * x.shape.numel()
