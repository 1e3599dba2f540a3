"""Moves gradients and values in a step that becomes a program: each move is a node of its graph.

A program's tensors have no memory to be moved into, and a compiler makes one loop of what is joined by `cat`: where
buckets and units write into buffers, these join and split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
Wait = Callable[[], Tensor]


class ProgramBuffer(FlatBuffer):
    """A flat buffer of a program: the same tensors move together."""

    def begin_reduce(self, wholes: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begins to sum the places' tensors, P -> S; gives what waits for the row of this place's parts."""
        begun = [self._begin("reduce_scatter", wholes[k].reshape(self.group.size, -1)) for k in self.loose]
        if self.packed:
            rows = torch.cat([self._rows(self.cuts[k], wholes[k]) for k in self.packed], 1)
            begun.insert(0, self._begin("reduce_scatter", rows))
        return lambda: torch.cat([wait() for wait in begun], 1) if len(begun) > 1 else begun[0]()

    def begin_gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begins to join the places' parts, S -> I; gives what waits for the whole tensors."""
        begun = {k: self._begin("all_gather", parts[k].to(self._dtype).reshape(1, -1)) for k in self.loose}
        if self.packed:
            own = [F.pad(parts[k].to(self._dtype).reshape(1, -1), (0, self._padding(k))) for k in self.packed]
            packed = self._begin("all_gather", torch.cat(own, 1))

        def wait() -> list[Tensor]:
            rows = packed() if self.packed else None
            found = []
            for k, cut in enumerate(self.cuts):
                own = begun[k]() if rows is None or k in begun else rows.narrow(1, self._starts[k], cut.width)
                found.append(_joined(cut, own))
            return found

        return wait

    def _begin(self, op: str, x: Tensor) -> Wait:
        return self._backend.begin(op, x.contiguous(), self.axes, self.group)

    def _padding(self, k: int) -> int:
        return self.cuts[k].width - prod(self._own_shapes[k])

    def _rows(self, cut: Cut, whole: Tensor) -> Tensor:
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

    _sum: Wait

    def launch(self) -> None:
        flat = torch.cat([part.reshape(-1) for part in _summed(self)])
        flat = flat if self.counts else torch.zeros_like(flat)
        self._sum = self.world.backend.begin("all_reduce", flat, self.axes, self.group)

    def finish(self) -> list[Tensor]:
        leaves = [m.leaf for m in self.members]
        flats = self._sum().split([leaf.numel() for leaf in leaves])
        return [part.view(leaf.shape) for part, leaf in zip(flats, leaves, strict=True)]

    def used(self, views: list[Tensor]) -> list[bool]:
        """All ranks trace one program, so what one has no gradient of, none has."""
        return self.had

    def give_away(self) -> None:
        """Each run of a program has memory of its own."""


class ProgramCutBucket(ProgramBucket):
    """Gradients of whose sums a program keeps this rank's parts, P -> S."""

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
        row = self._sum()
        if self._rest:
            row = row if self.counts else torch.zeros_like(row)
            row = self.world.backend.begin("all_reduce", row, self._rest, self._rest_group)()
        return [self._buffer.part(row, k) for k in range(len(self.members))]


def _summed(bucket: Bucket) -> list[Tensor]:
    """The gradients of a bucket; zeros for those that have not come."""
    grads = bucket.grads()
    bucket.had = [grad is not None for grad in grads]
    pairs = zip(bucket.members, grads, strict=True)
    return [torch.zeros_like(m.leaf) if g is None else g.to(m.leaf.dtype) for m, g in pairs]


class ProgramUnit(Unit):
    """Variables that a program gathers together, and again where backward opens them.

    Their values are written over what stands for them: what a compiler makes of it lives from a gathering to the last
    operation that reads it.
    """

    is_in_program = True
    made = staticmethod(lambda shape, dtype, device: torch.empty(tuple(shape), dtype=dtype, device=device))
    buffer_of = ProgramBuffer
    buffer: ProgramBuffer
    _wholes: Callable[[], list[Tensor]] | None = None
    _has_gone = False

    @property
    def is_coming(self) -> bool:
        return self._wholes is not None

    def start(self) -> None:
        with torch.no_grad(), events.for_purpose("parameters"):
            self._versions = [part._version for part in self.parts]
            self._wholes = self.buffer.begin_gather([part.detach() for part in self.parts])
        self.is_here = False

    def finish(self) -> None:
        if self._wholes is None:
            return
        wholes, self._wholes = self._wholes, None
        with torch.no_grad():
            for value, whole in zip(self.values, wholes(), strict=True):
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
