"""Operations of each element alone, with broadcasting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State

# In what an operation is linear: in its one operand, in all together (a sum), in each alone (a product), in the first
# (a quotient). Of such an operation a partial value stays partial.
Linear = Literal["no", "one", "sum", "product", "first"]


def elementwise(
    states: Sequence[State], shapes: Sequence[Shape], linear: Linear = "no", lean: int = 0
) -> Iterator[Option]:
    """Broadcasts.

    Args:
        lean: what is spread to so many times its elements is made whole before, as masks are; 0: nothing is.
    """
    yield from _partial(states, linear)
    whole = broadcast(shapes)
    for state, shape in zip(states, shapes, strict=True):
        if lean and prod(whole) >= lean * prod(shape):
            continue
        if isinstance(state, Cut) and shape[state.dim] == whole[state.dim + len(whole) - len(shape)]:
            behind = len(shape) - state.dim  # dims are counted from the last, as broadcasting does
            yield Option(
                tuple(aligned(one, len(whole) - behind, len(whole), state.sizes) for one in shapes),
                Cut(len(whole) - behind, state.sizes),
            )


def selected(states: Sequence[State], shapes: Sequence[Shape]) -> Iterator[Option]:
    """Chooses each element from one of two operands, by a condition, the first operand.

    One that all ranks know chooses between summands.
    """
    if PARTIAL in states[1:] and states[0] == WHOLE and not any(isinstance(state, Cut) for state in states):
        yield Option((WHOLE, *(PARTIAL,) * (len(states) - 1)), PARTIAL)
    yield from elementwise(states, shapes)


def _partial(states: Sequence[State], linear: Linear) -> Iterator[Option]:
    if PARTIAL not in states or linear == "no":
        return
    if linear in ("one", "sum"):
        # A part among zeros would be as large as the whole: a cut operand goes on cut.
        if not any(isinstance(state, Cut) for state in states):
            yield Option((PARTIAL,) * len(states), PARTIAL)
        return
    for k, state in enumerate(states[: 1 if linear == "first" else None]):
        if state == PARTIAL:
            yield Option((*(WHOLE,) * k, PARTIAL, *(WHOLE,) * (len(states) - k - 1)), PARTIAL)


def aligned(shape: Shape, dim: int, ndim: int, sizes: tuple[int, ...]) -> State:
    """Returns the state of an operand that meets others cut along `dim` of `ndim`: whole if broadcast."""
    own = dim - ndim + len(shape)
    return Cut(own, sizes) if own >= 0 and shape[own] == sum(sizes) else WHOLE


def broadcast(shapes: Sequence[Shape]) -> Shape:
    ndim = max(map(len, shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))
