"""Sharding: a layout on a mesh for one global shape; which part each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Any

from unidist.algebra.checks import fields_of
from unidist.algebra.layout import Layout
from unidist.algebra.mesh import Axes, Mesh
from unidist.errors import LayoutError

Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def chunk(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Returns (start, length) of each part of a dim, with torch.chunk's sizes.

    All are ceil-sized; the last may hold less or nothing.
    """
    step = -(-size // parts) if size else 0
    bounds = [min(k * step, size) for k in range(parts + 1)]
    return tuple((lo, hi - lo) for lo, hi in pairwise(bounds))


@dataclass(frozen=True)
class Sharding:
    """Says how a tensor of one global shape is laid out on a mesh.

    Raises:
        LayoutError: the layout names an unknown axis or more dims than the shape has, or is no Layout.
    """

    mesh: Mesh
    layout: Layout
    shape: Shape

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh) or not isinstance(self.layout, Layout):
            raise LayoutError(
                f"a Sharding is of a Mesh, a Layout and a shape, found {self.mesh!r}, {self.layout!r}, {self.shape!r}"
            )
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        self.layout.check(self.mesh, len(self.shape))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.layout, self.shape))

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)

    def with_layout(self, layout: Layout) -> Sharding:
        return Sharding(self.mesh, layout, self.shape)

    def region(self, rank: int) -> Region:
        """(start, length) along each dim of what a rank holds."""
        return _region(self, rank)

    def slices(self, rank: int) -> tuple[slice, ...]:
        return tuple(slice(lo, lo + n) for lo, n in self.region(rank))

    def local_shape(self, rank: int) -> Shape:
        return tuple(n for _, n in self.region(rank))

    def pieces(self, rank: int, dim: int, axes: Axes) -> tuple[int, ...]:
        """Returns the lengths along `dim` of the parts of this rank's share, one for each place of the group.

        `axes`, the dim's minor axes, cut the share into them.
        """
        held = [axis for axis in self.layout.dim_axes(dim) if axis not in axes]
        _, length = _cut(self.mesh, tuple(held), self.shape[dim], self.mesh.coordinate(rank))
        lengths = [length]
        for axis in axes:
            lengths = [n for size in lengths for _, n in chunk(size, self.mesh.axis_size(axis))]
        return tuple(lengths)

    @property
    def is_even(self) -> bool:
        """Is true where every rank holds the same shape."""
        return all(
            size % self.mesh.axis_size(axes) == 0 for size, axes in zip(self.shape, self.layout.dims, strict=False)
        )

    def elements(self, rank: int) -> int:
        return prod(self.local_shape(rank))


def _cut(mesh: Mesh, axes: Axes, size: int, coordinate: dict[str, int]) -> tuple[int, int]:
    start, length = 0, size
    for axis in axes:
        offset, length = chunk(length, mesh.axis_size(axis))[coordinate[axis]]
        start += offset
    return start, length


@lru_cache(maxsize=16384)
def _region(sharding: Sharding, rank: int) -> Region:
    coordinate = sharding.mesh.coordinate(rank)
    return tuple(
        _cut(sharding.mesh, sharding.layout.dim_axes(dim), size, coordinate) for dim, size in enumerate(sharding.shape)
    )
