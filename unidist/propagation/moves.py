"""Moves: how a value comes from one layout to another, and the bytes that it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from unidist.algebra.step import ring_bytes
from unidist.errors import LayoutError
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State, States, conflict, cut_dims, share

Op = Literal["slice", "reduce_scatter", "all_reduce", "all_to_all", "mask", "embed", "all_gather"]
# The op between two kinds of state. What makes a value smaller comes first, what makes it larger last.
OPS: dict[tuple[str, str], Op] = {
    ("R", "S"): "slice",
    ("P", "S"): "reduce_scatter",
    ("P", "R"): "all_reduce",
    ("S", "S"): "all_to_all",
    ("R", "P"): "mask",
    ("S", "P"): "embed",
    ("S", "R"): "all_gather",
}
ORDER = tuple(OPS.values())


@dataclass(frozen=True, slots=True)
class Move:
    """One move over axes (several only where a sum over them is joined).

    The adjoint carries a gradient back: slice and embed are each other's, all_gather's is reduce_scatter; the others
    are their own.
    """

    op: Op
    axes: tuple[int, ...]
    before: State
    after: State

    def bytes(self, places: int, full: int) -> Fraction:
        """Sent by each rank, of a full tensor of so many bytes."""
        return Fraction(0) if self.op in ("slice", "mask", "embed") else ring_bytes(self.op, places, full)


def kind(state: State) -> str:
    return "S" if isinstance(state, Cut) else state


@lru_cache(maxsize=1 << 14)
def moves(have: States, want: States) -> tuple[Move, ...]:
    """From one layout to another, in an order in which no dim is cut twice at any time.

    Raises:
        LayoutError: one of them cuts a dim twice.
    """
    if conflict(have) or conflict(want):
        raise LayoutError(f"{have} to {want}: two axes cut one dim")
    now, found = list(have), []
    while now != list(want):
        ready = [move for axis in range(len(now)) if (move := _next(now, want, axis)) is not None]
        if ready:
            move = min(ready, key=lambda one: ORDER.index(one.op))
        else:  # each dim waits for another axis to let it go: the first does
            axis = next(axis for axis in range(len(now)) if now[axis] != want[axis])
            move = Move("all_gather", (axis,), now[axis], WHOLE)
        if move.op == "all_reduce":
            together = tuple(axis for axis, state in enumerate(now) if state == PARTIAL and want[axis] == WHOLE)
            move = Move("all_reduce", together, PARTIAL, WHOLE)
        for axis in move.axes:
            now[axis] = move.after
        found.append(move)
    return tuple(found)


def _next(now: Sequence[State], want: States, axis: int) -> Move | None:
    have, to = now[axis], want[axis]
    if have == to:
        return None
    if isinstance(have, Cut) and isinstance(to, Cut) and have.dim == to.dim:
        return Move("all_gather", (axis,), have, WHOLE)  # and cut again, to other sizes
    others = [state for other, state in enumerate(now) if other != axis]
    if isinstance(to, Cut) and to.dim in cut_dims(others):
        return None
    return Move(OPS[kind(have), kind(to)], (axis,), have, to)


@lru_cache(maxsize=1 << 14)
def cost(shape: Shape, itemsize: int, have: States, want: States, sizes: tuple[int, ...]) -> Fraction:
    """Bytes that a rank sends for it; of uneven parts the mean, so that all ranks find the same."""
    now, total = list(have), Fraction(0)
    for move in moves(have, want):
        places = 1
        for axis in move.axes:
            places *= sizes[axis]
            if move.op != "all_to_all":  # whose full tensor is what a rank holds
                now[axis] = WHOLE
        total += move.bytes(places, share(shape, tuple(now), sizes) * itemsize)
        for axis in move.axes:
            now[axis] = move.after
    return total
