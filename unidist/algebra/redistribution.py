"""redistribution(src, dst): the shortest way by the table of Steps from one sharding to another."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations, count, permutations
from math import prod
from typing import NamedTuple

from unidist.algebra.layout import Layout, ReduceOp, State
from unidist.algebra.mesh import Axes
from unidist.algebra.sharding import Sharding
from unidist.algebra.step import ADJOINT, COLLECTIVES, Step, StepOp, ring_bytes
from unidist.errors import LayoutError


@dataclass(frozen=True)
class Redistribution:
    """The steps that take a tensor from `src` to `dst`, in order."""

    src: Sharding
    dst: Sharding
    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def adjoint(self) -> Redistribution:
        """The plan of the gradient: from dst.layout.dual() to src.layout.dual().

        Raises:
            LayoutError: a step reduces by max, min or prod.
        """
        return Redistribution(
            self.dst.with_layout(self.dst.layout.dual()),
            self.src.with_layout(self.src.layout.dual()),
            tuple(step.adjoint for step in reversed(self.steps)),
        )

    @cached_property
    def collectives(self) -> tuple[Step, ...]:
        """The steps that send something."""
        return tuple(step for step in self.steps if step.is_collective)

    def bytes(self, itemsize: int, rank: int) -> Fraction:
        """Bytes that a rank sends, by the ring bounds."""
        return sum((step.bytes(itemsize, rank) for step in self.steps), Fraction(0))


@lru_cache(maxsize=16384)
def redistribution(src: Sharding, dst: Sharding) -> Redistribution:
    """Returns the steps from `src` to `dst`: fewest bytes, fewest for the gradient, fewest collectives.

    An axis leaves its state only for the one it is wanted in, for I on the way, and, where it is sharded at either
    end, for other dims that the mesh divides: nothing is sharded, summed or masked that need not be. The way is found
    by Dijkstra's method over the layouts that remain, once for all shapes, and cached.

    Raises:
        LayoutError: the meshes or global shapes differ.
    """
    if src.mesh != dst.mesh or src.shape != dst.shape:
        raise LayoutError(f"cannot plan from {src} to {dst}: mesh and global shape must be the same")
    size = src.mesh.size
    roomy = tuple(n > 0 and n % size == 0 for n in src.shape)
    now, steps = src, []
    for move in _route(src.mesh.axes, src.layout, dst.layout, roomy):
        after = src.with_layout(move.layout)
        steps.append(Step(move.op, move.axes, now, after, move.dim, move.to, move.reduce))
        now = after
    return Redistribution(src, dst, tuple(steps))


class _Move(NamedTuple):
    """A Step that does not know the shape yet; `layout` is the one it leads to."""

    op: StepOp
    axes: Axes
    layout: Layout
    dim: int = -1
    to: int = -1
    reduce: ReduceOp = "sum"


# Bytes forward, bytes of the gradient, collectives, steps; then the order in which it was found.
_Cost = tuple[Fraction, Fraction, int, int]


@lru_cache(maxsize=16384)
def _route(
    mesh_axes: tuple[tuple[str, int], ...], src: Layout, dst: Layout, roomy: tuple[bool, ...]
) -> tuple[_Move, ...]:
    """Turns means into sums first and sums into means last, unless they stay.

    Between, every move is linear or a reduction by one op.
    """
    moves: list[_Move] = []
    now = src
    for axis, op in src.partial:
        if op == "mean" and dst.op_of(axis) != "mean":
            now = now.with_axis((axis,), "P", op="sum")
            moves.append(_Move("scale", (axis,), now, reduce="mean"))
    sums = dst
    late = [axis for axis, op in dst.partial if op == "mean" and now.op_of(axis) != "mean"]
    for axis in late:
        sums = sums.with_axis((axis,), "P", op="sum")
    moves += _Search(dict(mesh_axes), now, sums, roomy).run()
    for axis in late:
        sums = sums.with_axis((axis,), "P", op="mean")
        moves.append(_Move("scale", (axis,), sums, reduce="sum"))
    return tuple(moves)


class _Search:
    def __init__(self, sizes: dict[str, int], src: Layout, dst: Layout, roomy: tuple[bool, ...]) -> None:
        self.sizes = sizes
        self.src = src
        self.dst = dst
        self.roomy = roomy
        self.total = prod(sizes.values())

    def run(self) -> list[_Move]:
        """Dijkstra's method from src to dst."""
        start: _Cost = (Fraction(0), Fraction(0), 0, 0)
        best: dict[Layout, _Cost] = {self.src: start}
        came: dict[Layout, tuple[Layout, _Move]] = {}
        order = count(1)
        queue: list[tuple[_Cost, int, Layout]] = [(start, 0, self.src)]
        while queue:
            cost, _, now = heapq.heappop(queue)
            if now == self.dst:
                break
            if cost > best[now]:
                continue
            for move in self._moves(now):
                reached = self._cost(cost, now, move)
                if move.layout not in best or reached < best[move.layout]:
                    best[move.layout] = reached
                    came[move.layout] = now, move
                    heapq.heappush(queue, (reached, next(order), move.layout))
        back, found = self.dst, []
        while back != self.src:
            back, move = came[back]
            found.append(move)
        return found[::-1]

    def _cost(self, so_far: _Cost, now: Layout, move: _Move) -> _Cost:
        axis = move.axes[0]
        group = prod(self.sizes[a] for a in move.axes)
        full = max(self._share(now), self._share(move.layout))
        back = ADJOINT[move.op, now.state(axis), move.layout.state(axis)]
        sent, returned = (ring_bytes(op, group, full) if op in COLLECTIVES else Fraction(0) for op in (move.op, back))
        collective = int(group > 1 and move.op in COLLECTIVES)
        return so_far[0] + sent, so_far[1] + returned, so_far[2] + collective, so_far[3] + 1

    def _share(self, layout: Layout) -> int:
        """Returns the elements that a rank holds of a tensor of as many elements as the mesh has ranks."""
        return self.total // prod(self.sizes[axis] for axis in layout.sharded_axes)

    # the rows of the table that lead on from a layout ----------------------------------------------------------

    def _moves(self, now: Layout) -> Iterator[_Move]:
        for dim, axes in enumerate(now.dims):
            for first in range(len(axes)):
                yield from self._joins(now, axes[first:], dim)
        for op in dict.fromkeys(op for _, op in now.partial):
            leaving = [a for a, o in now.partial if o == op and self.dst.op_of(a) != op]
            yield from self._reductions(now, leaving, op)
        for state in ("I", "F"):
            here = [axis for axis in self.sizes if now.state(axis) == state]
            yield from self._cuts(now, "slice", [a for a in here if self.dst.state(a) == "S"])
            for axis in here:
                yield from self._retypes(now, axis, state)

    def _joins(self, now: Layout, axes: Axes, dim: int) -> Iterator[_Move]:
        for state in self._wholes(axes):
            yield _Move("all_gather", axes, now.with_axis(axes, state), dim)
        for to in range(len(self.roomy)):
            if to != dim and self._may_cut(axes, to):
                yield _Move("all_to_all", axes, now.with_axis(axes, "S", dim=to), dim, to)
        # Zeros around a part are neutral in a sum only.
        if all(self.dst.op_of(a) == "sum" for a in axes) and self._joinable(now, "sum"):
            yield _Move("embed", axes, now.with_axis(axes, "P"), dim)

    def _reductions(self, now: Layout, leaving: list[str], op: ReduceOp) -> Iterator[_Move]:
        for axes in _subsets(leaving):
            for state in self._wholes(axes):
                yield _Move("all_reduce", axes, now.with_axis(axes, state), reduce=op)
        yield from self._cuts(now, "reduce_scatter", [a for a in leaving if self.dst.state(a) == "S"], op)

    def _cuts(self, now: Layout, step: StepOp, axes: list[str], op: ReduceOp = "sum") -> Iterator[_Move]:
        for subset in _subsets(axes):
            for group in permutations(subset):
                for dim in range(len(self.roomy)):
                    if self._may_cut(group, dim):
                        yield _Move(step, group, now.with_axis(group, "S", dim=dim), dim, reduce=op)

    def _retypes(self, now: Layout, axis: str, state: State) -> Iterator[_Move]:
        want, op = self.dst.state(axis), self.dst.op_of(axis)
        if op is not None and self._joinable(now, op):
            yield _Move("mask", (axis,), now.with_axis((axis,), "P", op=op), reduce=op)
        elif want in ("I", "F") and want != state:
            yield _Move("retype", (axis,), now.with_axis((axis,), want))

    def _wholes(self, axes: Axes) -> tuple[State, ...]:
        """The states in which axes may be whole: I, and F where all of them are wanted so."""
        return ("F", "I") if all(self.dst.state(a) == "F" for a in axes) else ("I",)

    def _may_cut(self, axes: Axes, dim: int) -> bool:
        """Returns whether axes may cut a dim: it is their own at either end, or all the mesh divides it."""
        return self.roomy[dim] or all(dim in (self.src.dim_of(a), self.dst.dim_of(a)) for a in axes)

    def _joinable(self, now: Layout, op: ReduceOp) -> bool:
        linear = ("sum", "mean")
        return all(o == op or (o in linear and op in linear) for _, o in now.partial)


def _subsets(axes: Iterable[str]) -> Iterator[Axes]:
    members = tuple(axes)
    for size in range(len(members), 0, -1):
        yield from combinations(members, size)
