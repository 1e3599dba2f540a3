"""Several tensors behind each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, Cut, Shape, State


def joined(states: Sequence[State], shapes: Sequence[Shape], dim: int, new: bool) -> Iterator[Option]:
    """cat along a dim; `new`: stack along a new one."""
    if PARTIAL in states and not any(isinstance(state, Cut) for state in states):
        yield Option((PARTIAL,) * len(states), PARTIAL)
    for state in states:
        if isinstance(state, Cut) and (new or state.dim != dim) and _fits(state, shapes):
            yield Option((state,) * len(states), Cut(state.dim + (new and state.dim >= dim), state.sizes))


def _fits(cut: Cut, shapes: Sequence[Shape]) -> bool:
    """cat takes empty vectors beside tensors of any dims: such a list has no rule."""
    return all(len(shape) > cut.dim and shape[cut.dim] == sum(cut.sizes) for shape in shapes)
