"""FlatBuffer: tensors that are cut among one group and move together.

Small ones stand side by side in one padded buffer, whose row r holds the r-th part of each, so that one reduce_scatter
or all_gather moves them all. A tensor takes as many columns as its largest part has elements; where it divides evenly
there is no padding. On CPUs large ones whose parts are pieces of memory move by themselves, from and to where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from unidist.algebra import Axes, Group, Sharding
from unidist.backends.collectives import Handle
from unidist.keras.torch.world import RankWorld

# Bytes of a tensor from which on copying it into a buffer and out of it costs more than a collective of its own, on
# CPUs. Elsewhere starting a collective is what costs.
LOOSE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """Says how one tensor is cut: along `dim` into parts of `sizes`, one for each place of the group.

    Attributes:
        shape: of the whole tensor (whole for this group: it may be a shard over other axes).
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def is_in_pieces(self) -> bool:
        """Is true where the parts are equal pieces of the tensor's memory, one after the other."""
        return self.is_even and prod(self.shape[: self.dim]) == 1

    def part_shape(self, place: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.sizes[place], *self.shape[self.dim + 1 :])

    @property
    def width(self) -> int:
        return max(prod(self.part_shape(place)) for place in range(len(self.sizes)))


def is_nested(whole: Sharding, parts: Sharding) -> bool:
    """Returns whether `parts` cuts what `whole` holds further along one dim at most.

    It must do so by axes behind those that cut it.
    """
    axes = [a for a in parts.layout.sharded_axes if a not in whole.layout.sharded_axes]
    dims = {parts.layout.dim_of(axis) for axis in axes}
    behind = [a for dim in dims if dim is not None for a in parts.layout.dim_axes(dim)[-len(axes) :]]
    kept = all(parts.layout.dim_of(a) == whole.layout.dim_of(a) for a in whole.layout.sharded_axes)
    return kept and len(dims) <= 1 and set(behind) == set(axes)


def cut_between(whole: Sharding, parts: Sharding, rank: int) -> tuple[Axes, Cut] | None:
    """Returns the axes that cut in `parts` but not in `whole`, and how they cut this rank's tensor.

    None where none do.

    Args:
        whole, parts: nested, as the strategies' layouts of a variable are.
    """
    count = len(parts.layout.sharded_axes) - len(whole.layout.sharded_axes)
    found = [a for a in parts.layout.sharded_axes if a not in whole.layout.sharded_axes]
    dim = parts.layout.dim_of(found[0]) if found else None
    if dim is None:
        return None
    axes = parts.layout.dim_axes(dim)[-count:]
    return axes, Cut(whole.local_shape(rank), dim, parts.pieces(rank, dim, axes))


@dataclass(frozen=True, slots=True)
class Moving:
    """A flat buffer under way.

    Attributes:
        handles: of its collectives. buffer: of the small tensors.
        held: what must live until the wait.
    """

    handles: list[Handle]
    buffer: torch.Tensor | None
    held: list[torch.Tensor]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Rows that a program has begun to gather; they are copied into a whole tensor, where one is given."""

    backend: Any
    group: Group
    rows: torch.Tensor
    whole: torch.Tensor | None

    def wait(self) -> None:
        with self.backend.in_program(self.group):
            rows = self.backend.arrived("all_gather", self.rows)
        if self.whole is not None:
            self.whole.copy_(rows.view(self.whole.shape))


def _is_large(whole: torch.Tensor) -> bool:
    """Returns whether it is better not copied."""
    large = whole.numel() * whole.element_size() >= LOOSE_BYTES
    return large and whole.device.type == "cpu" and whole.is_contiguous()


class FlatBuffer:
    """Tensors of one dtype, cut among one group, on one rank.

    Attributes:
        axes, group: over which they are cut.
        loose: numbers of those that move by themselves; all members find the same ones. packed: of the others.

    Args:
        wholes: the whole tensors that will be moved, or tensors like them; their values need not be there.
    """

    def __init__(
        self, world: RankWorld, rank: int, axes: Axes, cuts: Sequence[Cut], wholes: Sequence[torch.Tensor]
    ) -> None:
        self.axes = axes
        self.group = world.mesh.group(axes, rank)
        self.cuts = tuple(cuts)
        self._backend = world.backend
        self._dtype, self._device = wholes[0].dtype, wholes[0].device
        self.loose = tuple(
            k
            for k, (cut, whole) in enumerate(zip(self.cuts, wholes, strict=True))
            if cut.is_in_pieces and _is_large(whole)
        )
        self.packed = tuple(k for k in range(len(self.cuts)) if k not in self.loose)
        self._packed_width = sum(self.cuts[k].width for k in self.packed)
        self._own_shapes = [cut.part_shape(self.group.index) for cut in self.cuts]
        self._starts = dict.fromkeys(range(len(self.cuts)), 0)
        self._width = 0
        for k in (*self.packed, *self.loose):
            self._starts[k] = self._width
            self._width += self.cuts[k].width

    def row(self) -> torch.Tensor:
        """An empty buffer of this place's part of each tensor."""
        return torch.empty((1, self._width), dtype=self._dtype, device=self._device)

    def _buffer(self) -> torch.Tensor:
        # Padding holds anything: nobody reads it.
        return torch.empty((self.group.size, self._packed_width), dtype=self._dtype, device=self._device)

    # moving -------------------------------------------------------------------------------------------------------

    def reduce(self, row: torch.Tensor, wholes: Sequence[torch.Tensor | None]) -> Moving:
        """Starts to sum the places' whole tensors (None: zeros): P -> S over the axes.

        `row` gets this place's parts. Sends (n-1)/n of the bytes. The tensors must stay as they are until the wait.
        """
        handles, held = [], []
        buffer = self._buffer() if self.packed else None
        for k in self.loose:
            whole = wholes[k]
            if whole is None:
                whole = torch.zeros(self.cuts[k].shape, dtype=self._dtype, device=self._device)
            held.append(whole.contiguous())
            handles.append(self._reduce(self.part(row, k).view(1, -1), held[-1].view(self.group.size, -1)))
        if buffer is not None:
            for k in self.packed:
                self._put(buffer, k, wholes[k])
            handles.append(self._reduce(row[:, : self._packed_width], buffer))
        return Moving(handles, buffer, held)

    def gather(self, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]) -> Moving:
        """Starts to join the places' parts: S -> I over the axes.

        Loose ones go into `wholes` (`parts` may be their memory), the others into the buffer, from which `take` puts
        them there after the wait. Parts of another dtype are cast. Sends (n-1)/n of the bytes.
        """
        handles, held = [], []
        buffer = self._buffer() if self.packed else None
        for k in self.loose:
            held.append(parts[k].to(self._dtype).reshape(1, -1))
            handles.append(self._gather(wholes[k].view(self.group.size, -1), held[-1]))
        if buffer is not None:
            row = buffer[self.group.index].unsqueeze(0)
            for k in self.packed:
                self.part(row, k).copy_(parts[k])
            handles.append(self._gather(buffer, row))
        return Moving(handles, buffer, held)

    def rows(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns whole tensors as programs gather them: a buffer of the packed ones, and each loose one."""
        rows = [wholes[k].reshape(self.group.size, -1).clone() for k in self.loose]
        if self.packed:
            rows.insert(0, self._buffer())
            for k in self.packed:
                self._put(rows[0], k, wholes[k])
        return rows

    def brought(self, rows: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]) -> Moving:
        """Takes over what a program has begun to gather, in the order of `rows`."""
        into = [*([None] if self.packed else []), *(wholes[k] for k in self.loose)]
        handles = [_Arriving(self._backend, self.group, *pair) for pair in zip(rows, into, strict=True)]
        return Moving(list(handles), rows[0] if self.packed else None, [])

    def _reduce(self, out: torch.Tensor, whole: torch.Tensor) -> Handle:
        self._backend.record("reduce_scatter", self.axes, self.group, whole)
        return self._backend.comm.reduce_scatter_into(out, whole, self.group, "sum")

    def _gather(self, out: torch.Tensor, part: torch.Tensor) -> Handle:
        self._backend.record("all_gather", self.axes, self.group, out)
        return self._backend.comm.all_gather_into(out, part, self.group)

    # parts --------------------------------------------------------------------------------------------------------

    def part(self, row: torch.Tensor, k: int) -> torch.Tensor:
        """This place's part of tensor k, as a view of a row."""
        shape = self._own_shapes[k]
        return row.view(-1).narrow(0, self._starts[k], prod(shape)).view(shape)

    def _put(self, buffer: torch.Tensor, k: int, whole: torch.Tensor | None) -> None:
        """Writes a whole tensor's parts into the rows; zeros for None."""
        for row, source in self._pairs(buffer, k, whole):
            row.zero_() if source is None else row.copy_(source)

    def take(self, buffer: torch.Tensor, k: int, out: torch.Tensor) -> None:
        """Joins the parts in the rows into a whole tensor, one of the packed."""
        for row, target in self._pairs(buffer, k, out):
            if target is not None:
                target.copy_(row)

    def _pairs(
        self, buffer: torch.Tensor, k: int, whole: torch.Tensor | None
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(view of rows, view of the same values in the tensor): one pair where it divides evenly."""
        cut, start = self.cuts[k], self._starts[k]
        if cut.is_even:
            shape = cut.part_shape(0)
            rows = buffer[:, start : start + prod(shape)].unflatten(1, shape or (1,))
            if whole is None:
                return [(rows, None)]
            return [(rows, whole.unflatten(cut.dim, (self.group.size, cut.sizes[0])).movedim(cut.dim, 0))]
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        offset = 0
        for place, size in enumerate(cut.sizes):
            shape = cut.part_shape(place)
            if prod(shape):
                row = buffer[place, start : start + prod(shape)].view(shape)
                pairs.append((row, None if whole is None else whole.narrow(cut.dim, offset, size)))
            offset += size
        return pairs
