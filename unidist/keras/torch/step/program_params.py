"""Moves gradients and values in a step that becomes a program: each move is a node of its graph.

A program's tensors have no memory to be moved into, and a compiler makes one loop of what is joined by `cat`: where
buckets and units write into buffers, these join and split.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812

from unidist import events
from unidist.algebra import Axes
from unidist.keras.torch.params.buckets import Bucket, Watched
from unidist.keras.torch.params.flat_buffer import Cut, FlatBuffer
from unidist.keras.torch.params.param_group import Unit
from unidist.keras.torch.world import RankWorld

Tensor = torch.Tensor


class ProgramBuffer(FlatBuffer):
    """A flat buffer of a program: the same tensors move together."""

    def begin_reduce(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Begins to sum the places' tensors, P -> S: the packed ones' rows, and those of each loose one."""
        begun = [self._begin("reduce_scatter", wholes[k].reshape(self.group.size, -1)) for k in self.loose]
        if self.packed:
            rows = torch.cat([self._rows_of(self.cuts[k], wholes[k]) for k in self.packed], 1)
            begun.insert(0, self._begin("reduce_scatter", rows))
        return begun

    def begin_gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Begins to join the places' parts, S -> I: the packed ones' rows, and those of each loose one."""
        begun = [self._begin("all_gather", parts[k].to(self._dtype).reshape(1, -1)) for k in self.loose]
        if self.packed:
            own = [F.pad(parts[k].to(self._dtype).reshape(1, -1), (0, self._padding(k))) for k in self.packed]
            begun.insert(0, self._begin("all_gather", torch.cat(own, 1)))
        return begun

    def wholes(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the whole tensors of what `begin_gather` began."""
        found = {}
        for k, own in zip(self.loose, rows[bool(self.packed) :], strict=True):
            found[k] = _joined(self.cuts[k], self._backend.arrived("all_gather", own))
        if self.packed:
            packed = self._backend.arrived("all_gather", rows[0])
            for k in self.packed:
                found[k] = _joined(self.cuts[k], packed.narrow(1, self._starts[k], self.cuts[k].width))
        return [found[k] for k in range(len(self.cuts))]

    def _begin(self, op: str, x: Tensor) -> Tensor:
        return self._backend.begin(op, x.contiguous(), self.axes, self.group)

    def _padding(self, k: int) -> int:
        return self.cuts[k].width - prod(self._own_shapes[k])

    def _rows_of(self, cut: Cut, whole: Tensor) -> Tensor:
        """Each place's part of a tensor, a row each."""
        if cut.is_even:
            places: Tensor = whole.unflatten(cut.dim, (self.group.size, cut.sizes[0]))
            return places.movedim(cut.dim, 0).flatten(1)
        parts = [part.reshape(1, -1) for part in whole.split(cut.sizes, cut.dim)]
        return torch.cat([F.pad(part, (0, cut.width - part.shape[1])) for part in parts])


def _joined(cut: Cut, rows: Tensor) -> Tensor:
    """A tensor of its places' parts, a row each."""
    if cut.is_even:
        places: Tensor = rows.unflatten(1, cut.part_shape(0))
        return places.movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1).contiguous()
    shapes = [cut.part_shape(place) for place in range(len(cut.sizes))]
    return torch.cat([row[: prod(shape)].view(shape) for row, shape in zip(rows, shapes, strict=True)], cut.dim)


class ProgramBucket(Bucket):
    """Gradients that a program sums on every rank, P -> I: begun as soon as backward has all of them."""

    _op = "all_reduce"
    _sum: list[Tensor]

    def launch(self) -> None:
        flat = torch.cat([part.reshape(-1) for part in _summed(self)])
        flat = flat if self.counts else torch.zeros_like(flat)
        self._sum = [self.world.backend.begin(self._op, flat, self.axes, self.group)]

    def finish(self) -> list[Tensor]:
        leaves = [m.leaf for m in self.members]
        flats = self._arrived().split([leaf.numel() for leaf in leaves])
        return [part.view(leaf.shape) for part, leaf in zip(flats, leaves, strict=True)]

    def _arrived(self) -> Tensor:
        found = [self.world.backend.arrived(self._op, x) for x in self._sum]
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def used(self, views: list[Tensor]) -> list[bool]:
        """All ranks trace one program, so what one has no gradient of, none has."""
        return self.had

    def give_away(self) -> None:
        """Each run of a program has memory of its own."""


class ProgramCutBucket(ProgramBucket):
    """Gradients of whose sums a program keeps this rank's parts, P -> S."""

    _op = "reduce_scatter"

    def __init__(self, world: RankWorld, rank: int, members: list[Watched]) -> None:
        super().__init__(world, rank, members)
        cut_axes = members[0].cut_axes
        self._rest: Axes = tuple(a for a in self.axes if a not in cut_axes)
        self._rest_group = world.mesh.group(self._rest, rank)
        cuts = [m.cut for m in members if m.cut is not None]
        self._buffer = ProgramBuffer(world, rank, cut_axes, cuts, [m.leaf for m in members])

    def launch(self) -> None:
        self._sum = self._buffer.begin_reduce(_summed(self))
        for member in self.members:
            member.leaf.grad = None

    def finish(self) -> list[Tensor]:
        row = self._arrived()
        if self._rest:
            row = row if self.counts else torch.zeros_like(row)
            backend = self.world.backend
            row = backend.arrived("all_reduce", backend.begin("all_reduce", row, self._rest, self._rest_group))
        return [self._buffer.part(row, k) for k in range(len(self.members))]


def _summed(bucket: Bucket) -> list[Tensor]:
    """The gradients of a bucket; zeros for those that have not come."""
    grads = bucket.grads()
    bucket.had = [grad is not None for grad in grads]
    pairs = zip(bucket.members, grads, strict=True)
    return [torch.zeros_like(m.leaf) if g is None else g.to(m.leaf.dtype) for m, g in pairs]


class ProgramUnit(Unit):
    """Variables that a program gathers together, and again where backward opens them.

    Those that it joins may be under way when it begins, and when it ends. Values are written over what stands for
    them: what a compiler makes of it lives from a gathering to the last operation that reads it.
    """

    made = staticmethod(lambda shape, dtype, device: torch.empty(tuple(shape), dtype=dtype, device=device))
    buffer_of = ProgramBuffer
    buffer: ProgramBuffer
    _has_gone = False

    @property
    def is_coming(self) -> bool:
        return bool(self._rows)

    def start(self) -> None:
        with torch.no_grad(), events.for_purpose("parameters"):
            self._versions = [part._version for part in self.parts]
            self.bring(self.buffer.begin_gather([part.detach() for part in self.parts]))

    def bring(self, rows: list[Tensor]) -> None:
        self._rows, self.is_here = rows, False

    def finish(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        with torch.no_grad():
            for value, whole in zip(self.values, self.buffer.wholes(rows), strict=True):
                value.data.copy_(whole)
        self.is_here = True

    def free(self) -> None:
        self.finish()
        if not self.is_kept and self.is_here:
            self.is_here, self._has_gone = False, True

    def open_cast(self, memory: int) -> None:
        for leaf, cast in self._casts if self._has_gone else ():
            if cast.untyped_storage()._cdata == memory:
                cast.copy_(leaf.data)
