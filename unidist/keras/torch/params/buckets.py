"""Buckets: gradients of one dtype that are reduced over one group, as one flat buffer.

A gradient that each rank keeps whole is in its buffer from when it has come until the next backward, and nowhere
else: all gradients together are held once. Source of the method: the views of buckets of PyTorch's
DistributedDataParallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from unidist.algebra import Axes, Group
from unidist.keras.torch.params.flat_buffer import Cut, FlatBuffer, Moving, cut_between
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.world import RankWorld

# Bytes of a gradient from which on it is moved as soon as it has come. Smaller ones move together.
LARGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Watched:
    """A variable whose gradient is reduced.

    Attributes:
        leaf: where backward puts the gradient. target: where the reduced one goes.
        axes: over which it arrives partial.
        cut_axes, cut: how the reduced gradient is cut among some of them; () and None: each rank has it whole.
        late: it arrives at the end of backward, so that no other shall wait for it.
        drifting: the axes over which it arrives whole, with other last bits.
        replaces: the path of the variable whose next value it is; "" where it is a gradient like any other.
    """

    leaf: torch.nn.Parameter
    target: torch.nn.Parameter
    axes: Axes
    cut_axes: Axes = ()
    cut: Cut | None = None
    late: bool = False
    drifting: Axes = ()
    replaces: str = ""

    @staticmethod
    def of(storage: Storage, rank: int, *, late: bool = False) -> Watched:
        found = cut_between(storage.sharding, storage.shardings.state, rank)
        cut_axes, cut = found or ((), None)
        axes, drifting = storage.summed_axes, storage.drifting_axes
        replaces = storage.path if storage.is_overwritten else ""
        return Watched(storage.leaf(rank), storage.states[rank], axes, cut_axes, cut, late, drifting, replaces)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Gradients of one kind may share a buffer."""
        return self.late, self.axes, self.drifting, self.cut_axes, self.leaf.dtype


class Bucket:
    """Gradients of one dtype that are reduced over one group, as one flat buffer.

    Along drifting axes the first rank's gradients count, so that replicas stay the same bits: the other ranks send
    zeros.

    Attributes:
        axes, group: over which gradients are sent.
        shards: how many data shards' gradients a sum is of.
        counts: whether this rank's gradients do.
    """

    def __init__(self, world: RankWorld, rank: int, members: list[Watched]) -> None:
        self.world = world
        self.members = members
        first = members[0]
        self.axes = (*first.axes, *first.drifting)
        self.group = world.mesh.group(self.axes, rank)
        self.shards = world.mesh.axis_size(first.axes)
        self.counts = world.is_first(rank, first.drifting)
        self.nbytes = sum(m.leaf.numel() * m.leaf.element_size() for m in members)
        self.missing = len(members)
        self.had: list[bool] = []
        # ids of the leaves whose gradients another reducer sees to in the backward that is going on
        self.left: set[int] = set()

    def give_away(self) -> None:
        """Gives what was reduced to whoever has it now: the next launch has memory of its own."""
        raise NotImplementedError

    def grads(self) -> list[torch.Tensor | None]:
        """Returns what is to be reduced."""
        return [None if id(m.leaf) in self.left else m.leaf.grad for m in self.members]

    def used(self, views: list[torch.Tensor]) -> list[bool]:
        """Returns whether any rank has a gradient of each member: this one, or another, as the sum shows.

        Read at once, since a read waits for the device.
        """
        asked = [k for k, had in enumerate(self.had) if not had and id(self.members[k].leaf) not in self.left]
        used = list(self.had)
        if asked:
            for k, found in zip(asked, torch.stack([views[k].any() for k in asked]).tolist(), strict=True):
                used[k] = found
        return used

    def take(self, place: int) -> None:
        """The gradient of the member at this place has come."""

    def launch(self) -> None:
        """Copies the gradients into the buffer and starts to reduce it."""
        raise NotImplementedError

    def finish(self) -> list[torch.Tensor]:
        """Waits for what is under way, if anything is; the reduced gradients, valid until the next launch."""
        raise NotImplementedError


class WholeBucket(Bucket):
    """Keeps the sums on every rank, P -> I.

    A gradient is a view of the buffer from when it has been copied into it.
    """

    def __init__(self, world: RankWorld, rank: int, members: list[Watched]) -> None:
        super().__init__(world, rank, members)
        leaves = [m.leaf for m in members]
        self._leaves = leaves
        self._make()
        self._is_given = False
        self._is_large = [p.numel() * p.element_size() >= LARGE_BYTES for p in leaves]
        self._handle: Any = None

    def _make(self) -> None:
        self._flat = self._leaves[0].new_zeros(sum(p.numel() for p in self._leaves)).detach()
        flats = self._flat.split([p.numel() for p in self._leaves])
        self._views = [flat.view(p.shape) for flat, p in zip(flats, self._leaves, strict=True)]

    def give_away(self) -> None:
        self._is_given = True

    def _renew(self) -> None:
        if self._is_given:
            self._make()
            self._is_given = False

    def take(self, place: int) -> None:
        """A large one is moved at once: what backward made of it is let go before the next one comes."""
        self._renew()
        leaf, view = self.members[place].leaf, self._views[place]
        grad = leaf.grad
        if grad is None or grad is view or not self._is_large[place] or id(leaf) in self.left:
            return
        with torch.no_grad():
            view.copy_(grad)
        leaf.grad = view

    def launch(self) -> None:
        self._renew()
        grads = self.grads()
        self.had = [g is not None for g in grads]
        missing = [v for v, g in zip(self._views, grads, strict=True) if g is None]
        if missing:
            torch._foreach_zero_(missing)
        new = [
            (m, v, g) for m, v, g in zip(self.members, self._views, grads, strict=True) if g is not None and g is not v
        ]
        if new:
            torch._foreach_copy_([v for _, v, _ in new], [g for _, _, g in new])
            for member, view, _ in new:
                member.leaf.grad = view
        if not self.counts:
            self._flat.zero_()
        backend = self.world.backend
        backend.record("all_reduce", self.axes, self.group, self._flat)
        self._handle = backend.comm.all_reduce_inplace(self._flat, self.group, "sum")

    def finish(self) -> list[torch.Tensor]:
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        return self._views


class CutBucket(Bucket):
    """P -> S: every rank keeps its part of each sum; the whole gradients live from launch to finish."""

    def __init__(self, world: RankWorld, rank: int, members: list[Watched]) -> None:
        super().__init__(world, rank, members)
        self.cut_axes = members[0].cut_axes
        self.rest: Axes = tuple(a for a in self.axes if a not in self.cut_axes)
        self.rest_group: Group | None = world.mesh.group(self.rest, rank) if self.rest else None
        cuts = [m.cut for m in members if m.cut is not None]
        self._buffer = FlatBuffer(world, rank, self.cut_axes, cuts, [m.leaf for m in members])
        self._row: torch.Tensor | None = None
        self._under_way: Moving | None = None

    def launch(self) -> None:
        grads = self.grads()
        self.had = [grad is not None for grad in grads]
        if self._row is None:
            self._row = self._buffer.row()
        self._under_way = self._buffer.reduce(self._row, grads)
        for member, had in zip(self.members, self.had, strict=True):
            if had:
                member.leaf.grad = None

    def give_away(self) -> None:
        self._row = None

    def finish(self) -> list[torch.Tensor]:
        backend = self.world.backend
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
            if self.rest_group is not None and self._row is not None:
                if not self.counts:
                    self._row.zero_()
                backend.record("all_reduce", self.rest, self.rest_group, self._row)
                backend.comm.all_reduce_inplace(self._row, self.rest_group, "sum").wait()
        row = self._row if self._row is not None else self._buffer.row()
        return [self._buffer.part(row, k) for k in range(len(self.members))]
