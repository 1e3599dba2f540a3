"""Step: one row of the table of moves between layouts, with its effect, adjoint and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from unidist.algebra.layout import ReduceOp, State
from unidist.algebra.mesh import Axes
from unidist.algebra.sharding import Sharding
from unidist.errors import LayoutError

StepOp = Literal[
    "all_reduce",  # P -> I | F
    "reduce_scatter",  # P -> S
    "all_gather",  # S -> I | F
    "all_to_all",  # S(dim) -> S(to)
    "slice",  # I | F -> S         keeps this rank's part
    "embed",  # S -> P             this rank's part among zeros
    "mask",  # I | F -> P          kept at place 0, the op's neutral element elsewhere
    "retype",  # I <-> F           the value stays, its gradient is reduced or masked
    "scale",  # P(mean) <-> P(sum)  times 1/n or n; its adjoint on F
]
COLLECTIVES: tuple[StepOp, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")

# The op that carries the gradient back, by the op and the states of its axes before and after.
ADJOINT: dict[tuple[StepOp, State, State], StepOp] = {
    ("all_reduce", "P", "I"): "retype",
    ("all_reduce", "P", "F"): "all_reduce",
    ("reduce_scatter", "P", "S"): "all_gather",
    ("all_gather", "S", "I"): "slice",
    ("all_gather", "S", "F"): "reduce_scatter",
    ("all_to_all", "S", "S"): "all_to_all",
    ("slice", "I", "S"): "all_gather",
    ("slice", "F", "S"): "embed",
    ("embed", "S", "P"): "slice",
    ("mask", "I", "P"): "retype",
    ("mask", "F", "P"): "mask",
    ("retype", "I", "F"): "all_reduce",
    ("retype", "F", "I"): "mask",
    ("scale", "P", "P"): "scale",
    ("scale", "F", "F"): "scale",
}

# Bytes that a rank sends in a ring, for n ranks and a full tensor of b bytes (Patarasuk and Yuan, 2009).
RING: dict[str, Callable[[int, int], Fraction]] = {
    "all_reduce": lambda n, b: Fraction(2 * (n - 1) * b, n),
    "reduce_scatter": lambda n, b: Fraction((n - 1) * b, n),
    "all_gather": lambda n, b: Fraction((n - 1) * b, n),
    "all_to_all": lambda n, b: Fraction((n - 1) * b, n),
    "broadcast": lambda n, b: Fraction((n - 1) * b, n),
    "permute": lambda n, b: Fraction(b),
}


def ring_bytes(op: str, group_size: int, full_bytes: int) -> Fraction:
    """Bytes sent per rank by a collective over a group, by the ring bound.

    Args:
        op: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast or permute.
        group_size: number of ranks n.
        full_bytes: bytes of the full tensor: the input of all_reduce, reduce_scatter, all_to_all, broadcast and
            permute (what one rank holds), the output of all_gather.
    """
    return RING[op](group_size, full_bytes) if group_size > 1 else Fraction(0)


@dataclass(frozen=True, slots=True)
class Step:
    """One move of a tensor from one sharding to the next, over the group of `axes` (major to minor).

    `dim` is the dimension that is cut or joined; `to` the one that all_to_all cuts; `reduce` the op of P, for scale
    the op that is left.
    """

    op: StepOp
    axes: Axes
    before: Sharding
    after: Sharding
    dim: int = -1
    to: int = -1
    reduce: ReduceOp = "sum"

    @property
    def is_collective(self) -> bool:
        """Is true where something is sent: over axes of size 1 nothing is."""
        return self.op in COLLECTIVES and self.group_size > 1

    @property
    def group_size(self) -> int:
        return self.before.mesh.axis_size(self.axes)

    @property
    def factor(self) -> float:
        """The factor that `scale` multiplies by."""
        return 1 / self.group_size if self.reduce == "mean" else float(self.group_size)

    @property
    def adjoint(self) -> Step:
        """The step that carries the gradient back: from the dual of `after` to the dual of `before`.

        Raises:
            LayoutError: a reduction by max, min or prod, which has no adjoint.
        """
        if self.op in ("all_reduce", "reduce_scatter", "mask") and self.reduce != "sum":
            raise LayoutError(f"{self.op} by {self.reduce} over {self.axes} is not linear and has no adjoint")
        before = self.after.with_layout(self.after.layout.dual())
        after = self.before.with_layout(self.before.layout.dual())
        if self.op == "all_to_all":
            return Step("all_to_all", self.axes, before, after, dim=self.to, to=self.dim)
        # Scaling is its own adjoint: the factor stays, though the gradient is partial over no axis any more.
        reduce: ReduceOp = self.reduce if self.op == "scale" else "sum"
        return Step(self._adjoint_op(), self.axes, before, after, dim=self.dim, reduce=reduce)

    def _adjoint_op(self) -> StepOp:
        axis = self.axes[0]
        return ADJOINT[self.op, self.before.layout.state(axis), self.after.layout.state(axis)]

    def bytes(self, itemsize: int, rank: int) -> Fraction:
        """Bytes that a rank sends, by the ring bound (0 for the moves that need no communication)."""
        if not self.is_collective:
            return Fraction(0)
        full = self.after if self.op == "all_gather" else self.before
        return ring_bytes(self.op, self.group_size, full.elements(rank) * itemsize)
