"""Parcel: tensors that are cut among one group, side by side in one padded buffer.

Row r of the buffer holds the r-th part of each tensor, so that one reduce_scatter or all_gather moves them all. A
tensor takes as many columns as its largest part has elements; where it divides evenly there is no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from unidist.algebra import Axes, Group, Sharding


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor is cut: along `dim` into parts of `sizes`, one for each place of the group.

    Attributes:
        shape: of the whole tensor (whole for this group: it may be a shard over other axes).
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    def part_shape(self, place: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.sizes[place], *self.shape[self.dim + 1 :])

    @property
    def width(self) -> int:
        return max(prod(self.part_shape(place)) for place in range(len(self.sizes)))


def is_nested(whole: Sharding, parts: Sharding) -> bool:
    """Whether `parts` cuts what `whole` holds further along one dim at most, by axes behind those that cut it."""
    axes = [a for a in parts.layout.sharded_axes if a not in whole.layout.sharded_axes]
    dims = {parts.layout.dim_of(axis) for axis in axes}
    behind = [a for dim in dims if dim is not None for a in parts.layout.dim_axes(dim)[-len(axes) :]]
    kept = all(parts.layout.dim_of(a) == whole.layout.dim_of(a) for a in whole.layout.sharded_axes)
    return kept and len(dims) <= 1 and set(behind) == set(axes)


def cut_between(whole: Sharding, parts: Sharding, rank: int) -> tuple[Axes, Cut] | None:
    """The axes that cut in `parts` but not in `whole`, and how they cut this rank's tensor; None where none do.

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


class Parcel:
    """Cuts of one dtype among one group.

    Attributes:
        width: columns of the buffer; it has group.size rows.
    """

    def __init__(self, group: Group, cuts: Sequence[Cut], like: torch.Tensor) -> None:
        self.group = group
        self.cuts = tuple(cuts)
        self._dtype, self._device = like.dtype, like.device
        self._starts: list[int] = []
        self.width = 0
        for cut in self.cuts:
            self._starts.append(self.width)
            self.width += cut.width

    def buffer(self) -> torch.Tensor:
        """An empty buffer of all rows. Padding holds anything: nobody reads it."""
        return torch.empty((self.group.size, self.width), dtype=self._dtype, device=self._device)

    def row(self) -> torch.Tensor:
        """An empty buffer of one row, shaped as a part of the whole buffer."""
        return torch.empty((1, self.width), dtype=self._dtype, device=self._device)

    def part(self, row: torch.Tensor, k: int) -> torch.Tensor:
        """This place's part of tensor k, as a view of a row."""
        shape = self.cuts[k].part_shape(self.group.index)
        return row.view(-1)[self._starts[k] : self._starts[k] + prod(shape)].view(shape)

    def put(self, buffer: torch.Tensor, k: int, whole: torch.Tensor | None) -> None:
        """Writes a whole tensor's parts into the rows; zeros for None."""
        for row, source in self._pairs(buffer, k, whole):
            row.zero_() if source is None else row.copy_(source)

    def take(self, buffer: torch.Tensor, k: int, out: torch.Tensor) -> None:
        """Joins the parts in the rows into a whole tensor."""
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
