"""plan(src, dst): the shortest way by the table of Steps from one sharding to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from unidist.algebra.layout import Layout, State
from unidist.algebra.mesh import Axes
from unidist.algebra.sharding import Sharding
from unidist.algebra.step import Step, StepOp
from unidist.errors import LayoutError


@dataclass(frozen=True)
class Plan:
    """The steps that take a tensor from `src` to `dst`, in order."""

    src: Sharding
    dst: Sharding
    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def adjoint(self) -> Plan:
        """The plan of the gradient: from dst.layout.dual() to src.layout.dual().

        Raises:
            LayoutError: a step reduces by max, min or prod.
        """
        return Plan(
            self.dst.with_layout(self.dst.layout.dual()),
            self.src.with_layout(self.src.layout.dual()),
            tuple(step.adjoint for step in reversed(self.steps)),
        )

    @cached_property
    def collectives(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.is_collective)

    def bytes(self, itemsize: int, rank: int) -> Fraction:
        """Bytes that a rank sends, by the ring bounds."""
        return sum((step.bytes(itemsize, rank) for step in self.steps), Fraction(0))


@lru_cache(maxsize=16384)
def plan(src: Sharding, dst: Sharding) -> Plan:
    """The steps from `src` to `dst`, found greedily and cached.

    Order: fill every open place of a dim (reduce_scatter, all_to_all, slice); reduce what is partial while the
    tensor is small; then join one misplaced dim and begin again. Axes that move alike move together, as one
    collective over their group.

    Raises:
        LayoutError: the meshes or global shapes differ.
    """
    if src.mesh != dst.mesh or src.shape != dst.shape:
        raise LayoutError(f"cannot plan from {src} to {dst}: mesh and global shape must be the same")
    return Plan(src, dst, tuple(_Planner(src, dst).run()))


class _Planner:
    def __init__(self, src: Sharding, dst: Sharding) -> None:
        self.now = src
        self.want = dst.layout
        self.ndim = len(src.shape)
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        self._unmean()
        while self._fill() or self._reduce() or self._strip():
            pass
        self._finish()
        return self.steps

    # one step -------------------------------------------------------------------------------------------------

    def _add(self, op: StepOp, axes: Axes, layout: Layout, *, dim: int = -1, to: int = -1) -> None:
        after = self.now.with_layout(layout)
        state = self.now.layout.op_of(axes[0]) or layout.op_of(axes[0]) or "sum"
        self.steps.append(Step(op, axes, self.now, after, dim, to, state))
        self.now = after

    def _move(self, op: StepOp, axes: Axes, state: State, *, dim: int = -1, to: int = -1) -> None:
        target = to if op == "all_to_all" else dim
        layout = self.now.layout.with_axis(
            axes,
            state,
            dim=target if state == "S" else None,
            op=(self.want.op_of(axes[0]) or "sum") if op == "mask" else "sum",
        )
        self._add(op, axes, layout, dim=dim, to=to)

    # phases ---------------------------------------------------------------------------------------------------

    def _unmean(self) -> None:
        """P(mean) -> P(sum) first, unless it stays: then every reduction is a sum."""
        for axis, op in self.now.layout.partial:
            if op == "mean" and self.want.op_of(axis) != "mean":
                self._add("scale", (axis,), self.now.layout.with_axis((axis,), "P", op="sum"))

    def _open(self, dim: int) -> Axes:
        """The axes still wanted on a dim whose axes so far are in place."""
        held, wanted = self.now.layout.dim_axes(dim), self.want.dim_axes(dim)
        return wanted[len(held) :] if wanted[: len(held)] == held else ()

    def _fill(self) -> bool:
        for dim in range(self.ndim):
            todo = self._open(dim)
            if todo and self._fill_one(dim, todo):
                return True
        return False

    def _fill_one(self, dim: int, todo: Axes) -> bool:
        layout = self.now.layout
        state = layout.state(todo[0])
        if state == "S":
            source = layout.dim_of(todo[0])
            if source is None or source == dim:
                return False
            for count in range(len(todo), 0, -1):
                if layout.dim_axes(source)[-count:] == todo[:count]:
                    self._move("all_to_all", todo[:count], "S", dim=source, to=dim)
                    return True
            return False
        count = 1
        kind = (state, layout.op_of(todo[0]))
        while count < len(todo) and (layout.state(todo[count]), layout.op_of(todo[count])) == kind:
            count += 1
        self._move("reduce_scatter" if state == "P" else "slice", todo[:count], "S", dim=dim)
        return True

    def _reduce(self) -> bool:
        """Reduce partial axes that are wanted whole, or partial by another op."""
        for axis, op in self.now.layout.partial:
            target = self.want.state(axis)
            if target == "S" or self._stays_partial(axis):
                continue
            state: State = "F" if target == "F" else "I"
            axes = tuple(
                a
                for a in self.now.mesh.axis_names
                if self.now.layout.op_of(a) == op
                and self.want.state(a) == target
                and not self._stays_partial(a)
            )
            self._move("all_reduce", axes, state)
            return True
        return False

    def _stays_partial(self, axis: str) -> bool:
        return self.want.op_of(axis) == self.now.layout.op_of(axis) or (
            self.now.layout.op_of(axis) == "sum" and self.want.op_of(axis) == "mean"
        )

    def _strip(self) -> bool:
        """Join the minor axes of one dim whose axes are not in place."""
        for dim in range(self.ndim):
            held, wanted = self.now.layout.dim_axes(dim), self.want.dim_axes(dim)
            keep = 0
            while keep < min(len(held), len(wanted)) and held[keep] == wanted[keep]:
                keep += 1
            if keep == len(held):
                continue
            target = self._strip_target(held[-1])
            first = len(held) - 1
            while first > keep and self._strip_target(held[first - 1]) == target:
                first -= 1
            axes = held[first:]
            if target == "P":
                self._move("embed", axes, "P", dim=dim)
            else:
                self._move("all_gather", axes, target, dim=dim)
            return True
        return False

    def _strip_target(self, axis: str) -> State:
        if self.want.op_of(axis) in ("sum", "mean"):
            return "P"
        return "F" if self.want.state(axis) == "F" else "I"

    def _finish(self) -> None:
        for axis in self.now.mesh.axis_names:
            target = self.want.state(axis)
            if self.now.layout.state(axis) != target:
                if target == "P":
                    self._to_partial(axis)
                else:
                    self._move("retype", (axis,), target)
            if target == "P" and self.now.layout.op_of(axis) != self.want.op_of(axis):
                self._add("scale", (axis,), self.now.layout.with_axis((axis,), "P", op="mean"))

    def _to_partial(self, axis: str) -> None:
        op = self.want.op_of(axis) or "sum"
        layout = self.now.layout.with_axis((axis,), "P", op="sum" if op == "mean" else op)
        self._add("mask", (axis,), layout)
