"""The bytes of a region of a row-major tensor: contiguous runs, all of one length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from unidist.algebra.sharding import Region as Region
from unidist.errors import CheckpointError

# Offsets are handed out so many at a time: those of a narrow column of a long tensor need not be held at once.
BATCH = 1 << 16


def batches(shape: Sequence[int], itemsize: int, region: Region) -> Iterator[tuple[NDArray[np.int64], int]]:
    """(offsets, length) of the runs of bytes of a region, in order, at most `BATCH` of them; no two touch.

    Args:
        shape: the tensor's.
        itemsize: bytes of an item.
        region: (first index, how many) for each dim.

    Example:
        >>> list(batches((3, 4), 2, ((1, 2), (0, 2))))
        [(array([ 8, 16]), 4)]
    """
    check(shape, region)
    counts = [n for _, n in region]
    if 0 in counts:
        return
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(first * stride for (first, _), stride in zip(region, strides, strict=True))
    # From the last dim on those that are taken whole, and the one before them, are one run.
    inner = len(shape)
    while inner > 0 and counts[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length = itemsize * math.prod(counts[inner:]) if counts else itemsize
    outer, steps = counts[:inner], strides[:inner]
    total = math.prod(outer)
    for begin in range(0, total, BATCH):
        left = np.arange(begin, min(begin + BATCH, total))
        offsets = np.full(len(left), base)
        for count, step in zip(reversed(outer), reversed(steps), strict=True):
            left, index = np.divmod(left, count)
            offsets += index * step
        yield offsets, length


def rows_dim(shape: Sequence[int]) -> int:
    """The first dim of more than one entry, or 0: a range along it is a range of bytes."""
    return next((k for k, size in enumerate(shape) if size > 1), 0)


def whole(shape: Sequence[int]) -> Region:
    """The region that is all of a tensor."""
    return tuple((0, n) for n in shape)


def check(shape: Sequence[int], region: Region) -> None:
    """Raises CheckpointError where a region is not inside of a tensor of this shape."""
    if len(region) != len(shape) or not all(
        first >= 0 and n >= 0 and first + n <= size for (first, n), size in zip(region, shape, strict=True)
    ):
        raise CheckpointError(f"the region {region} is not inside of the shape {tuple(shape)}")
