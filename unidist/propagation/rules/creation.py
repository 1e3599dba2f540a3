"""The rules of operations that only look at the shape of a tensor: constants like it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import WHOLE, Cut, Shape, State


def like(states: Sequence[State], shapes: Sequence[Shape]) -> Iterator[Option]:
    """The values of the tensor are not read, so a partial one stays as it is and what comes is whole."""
    (state,) = states
    yield Option((state,), state if isinstance(state, Cut) else WHOLE)
