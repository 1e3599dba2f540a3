"""Space: a mesh seen from one rank, over which values are laid out. Spec: a layout of a shape in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from unidist import events
from unidist.algebra import Axes, Group, Layout, Mesh, Sharding
from unidist.backends.collectives import Collectives
from unidist.backends.local import LocalViewBackend
from unidist.backends.torch.sharded.masks import Masks
from unidist.propagation.layouts import (
    PARTIAL,
    WHOLE,
    Shape,
    States,
    check,
    chunked,
    cuts,
    dual,
    fraction,
    layout_of,
    local_shape,
    whole_shape,
)

Note = Callable[[str, Axes, Group, Any], None]
Redistribute = Callable[[torch.Tensor, Sharding, Sharding], torch.Tensor]
# The purpose of what an operation gathers begins so.
NO_RULE = "no rule for "
# Plans kept of one rank, of calls whose numbers change at every step too.
PLANS_KEPT = 8192


class Spec:
    """The layout of one global shape. One object for each that a space has, compared by identity.

    Attributes:
        states: over each axis of the mesh.
        shape: the global one.
        local: the shape that this rank holds.
        whole: whether each rank holds all of it.
        partial: whether ranks hold summands over some axis.
    """

    __slots__ = ("_dual", "local", "partial", "shape", "space", "states", "whole")

    def __init__(self, space: Space, states: States, shape: torch.Size) -> None:
        self.space, self.states, self.shape = space, states, shape
        self.local = torch.Size(local_shape(shape, states, space.places))
        self.whole = all(state == WHOLE for state in states)
        self.partial = PARTIAL in states
        self._dual: Spec | None = None

    def __repr__(self) -> str:
        named = zip(map("+".join, self.space.lines), self.states, strict=True)
        return ", ".join(
            f"{axis}: {state!r}" if state not in ("R", "P") else f"{axis}: {state}" for axis, state in named
        )

    @property
    def dual(self) -> Spec:
        """The spec of the gradient."""
        if self._dual is None:
            self._dual = self.space.spec(dual(self.states), self.shape)
        return self._dual

    @property
    def joined(self) -> Spec:
        """Without partial sums."""
        return self.space.spec(tuple(WHOLE if s == PARTIAL else s for s in self.states), self.shape)


class Full(NamedTuple):
    """The shape and dtype of a full tensor, which a collective is noted with."""

    shape: Shape
    dtype: torch.dtype


class Space:
    """A mesh as one rank sees it, with the collectives that join its ranks.

    All ranks of a space are one program: they come to each collective in the same order, with the same shapes.

    Args:
        mesh: the axes.
        rank: this one.
        comm: gives its collectives, as they are at the moment: those of a program while it is traced.
        note: is called before each collective, with its name, axes, group, and full tensor.
        lines: what a state is given of: each one axis of the mesh, or several that cut as one. None: each axis. Ranks
            that differ along other axes are programs of their own.
        redistribute: carries a tensor between two shardings, of an invariant space.

    Attributes:
        invariant: a plain tensor is the same on all ranks, and so is its gradient (the algebra's I). What an operation
            makes whole is plain again. Else the gradient of what is whole is partial, plain or not.
        gathers: how often each operation had to gather, by its name.
        moves: collectives so far.
        fan: fans out a plain tensor together with others, of an invariant space; gives None for one that goes alone.
        exact: all ranks' generators stand alike, so random numbers are those of one device.
        frugal: values are large, as of variables: what is gathered of one is not kept for who asks next.
        holds: parts may be carriers of another space, also where this one is invariant.
        lean: masks that are cut are made whole before they are spread over pairs of places.
        masks: what keeps masks of attention for backward; None: torch does.
        turns: whether products turn a cut operand to another of its dims: "less", where that sends less, or "always",
            where operands are cut along several. "ring": not, and attention's keys go round. Of a space of one line.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        comm: Callable[[], Collectives[torch.Tensor]],
        note: Note | None = None,
        lines: tuple[Axes, ...] | None = None,
        redistribute: Redistribute | None = None,
    ) -> None:
        self.mesh, self.rank, self._comm = mesh, rank, comm
        self._note, self.redistribute = note, redistribute
        self.invariant = redistribute is not None
        self.lines = tuple((axis,) for axis in mesh.axis_names) if lines is None else lines
        self.sizes: tuple[int, ...] = tuple(mesh.axis_size(line) for line in self.lines)
        self.places: tuple[int, ...] = tuple(mesh.group(line, rank).index for line in self.lines)
        self.gathers: Counter[str] = Counter()
        self.moves = 0
        self.fan: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.exact = self.frugal = self.holds = self.lean = False
        self.turns: Literal["no", "less", "always", "ring"] = "no"
        self.masks: Masks | None = None
        self.plans: dict[Any, Any] = {}
        self._specs: dict[tuple[States, Shape], Spec] = {}
        self._groups: dict[tuple[int, ...], tuple[Axes, Group]] = {}

    @classmethod
    def of(
        cls,
        backend: LocalViewBackend[torch.Tensor],
        mesh: Mesh,
        lines: tuple[Axes, ...] | None = None,
        invariant: bool = False,
    ) -> Space:
        """Returns the space of a backend whose ranks hold torch tensors; asked in the rank's thread."""
        redistribute = backend.redistribute if invariant else None
        return cls(mesh, backend.rank, lambda: backend.comm, backend.record, lines, redistribute)

    @property
    def comm(self) -> Collectives[torch.Tensor]:
        return self._comm()

    def spec(self, states: States, shape: Shape) -> Spec:
        """Raises LayoutError where the states do not fit the shape."""
        found = self._specs.get((states, shape))
        if found is None:
            check(shape, states, self.sizes)
            found = self._specs[states, shape] = Spec(self, states, torch.Size(shape))
        return found

    def whole(self, shape: Shape) -> Spec:
        return self.spec((WHOLE,) * len(self.sizes), shape)

    def spec_of(self, states: States, local: torch.Size) -> Spec:
        """Returns the spec of a value whose part on this rank has that shape."""
        return self.spec(states, whole_shape(local, states))

    @property
    def turning(self) -> int:
        """The places over which products may turn their operands; 0: they may not."""
        return self.sizes[0] if self.turns in ("less", "always") else 0

    def keep(self, key: Any, plan: Any) -> None:
        if len(self.plans) >= PLANS_KEPT:
            self.plans.clear()
        self.plans[key] = plan

    def group(self, axes: tuple[int, ...]) -> tuple[Axes, Group]:
        """The names of axes, and this rank's group along them."""
        found = self._groups.get(axes)
        if found is None:
            names = tuple(axis for line in axes for axis in self.lines[line])
            found = self._groups[axes] = names, self.mesh.group(names, self.rank)
        return found

    def note(self, op: str, axes: Axes, group: Group, shape: Shape, x: torch.Tensor) -> None:
        self.moves += 1
        if self._note is not None:
            self._note(op, axes, group, Full(shape, x.dtype))

    def layout(self, states: States, fanned: bool = True) -> Layout | None:
        """The algebra's of states; None where a cut has other sizes than torch.chunk's.

        Args:
            fanned: what is whole has a partial gradient (F), and not a whole one (I).
        """
        if any(cut != chunked(cut.dim, sum(cut.sizes), self.sizes[line]) for line, cut in cuts(states)):
            return None
        return layout_of(states, self.lines, fanned)

    def first(self, states: States) -> bool:
        """Returns whether this rank's summand holds what is added once.

        It is the first place of each partial axis.
        """
        return not any(place and state == PARTIAL for place, state in zip(self.places, states, strict=True))

    @contextmanager
    def gathering(self, name: str) -> Iterator[None]:
        """An operation makes wholes of its operands inside: it is counted, and collectives are for it."""
        self.gathers[name] += 1
        with events.for_purpose((self.invariant and events.purpose()) or NO_RULE + name):
            yield

    def fraction(self, axes: Iterable[int]) -> float:
        """This rank's part of what all places along axes hold alike."""
        return prod(fraction(self.places[axis], self.sizes[axis]) for axis in axes)

    def all_reduce(self, x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        names, group = self.group(axes)
        if group.size == 1:
            return x
        self.note("all_reduce", names, group, x.shape, x)
        return self.comm.all_reduce(x, group, "sum")

    def agreed(self, number: int) -> int:
        """The number that the mesh's first rank comes with."""
        names, group = self.group(tuple(range(len(self.sizes))))
        if group.size == 1:
            return number
        x = torch.tensor(number)
        self.note("broadcast", names, group, x.shape, x)
        return int(self.comm.broadcast(x, group, 0))
