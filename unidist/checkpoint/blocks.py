"""The blocks of a checkpoint that is read: where they begin, and what their checksums are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint import manifest
from unidist.checkpoint.checksums import BLOCK, Bytes, sums
from unidist.checkpoint.opened import Opened
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError

_Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges in which a tensor was written.

    Attributes:
        begins: of each, in the tensor.
        bounds: `begins`, and the tensor's end.
        firsts: the number of each range's first block.
        block: bytes of a block, counted from a range's first byte.
    """

    begins: _Offsets
    bounds: _Offsets
    firsts: _Offsets
    block: int

    @classmethod
    def of(cls, begins: _Offsets, nbytes: int, first: int) -> Ranges:
        bounds = np.append(begins, nbytes)
        blocks = -(-np.diff(bounds) // BLOCK)
        return cls(begins, bounds, first + np.cumsum(blocks) - blocks, BLOCK)

    @classmethod
    def whole(cls, tensor: Tensor) -> Ranges:
        """One range of single bytes: where nothing is verified, anything may be read alone."""
        return cls(np.zeros(1, np.int64), np.array([0, tensor.nbytes]), np.zeros(1, np.int64), 1)

    def _range(self, at: Any) -> Any:
        return self.begins.searchsorted(at, "right") - 1

    def around(self, offsets: _Offsets, length: int) -> tuple[_Offsets, _Offsets]:
        """(begin, end) of the blocks that hold each of some runs of one length."""
        at = self._range(offsets)
        begin = offsets - (offsets - self.begins[at]) % self.block
        ends = offsets + length
        at = self._range(ends - 1)
        within = -(-(ends - self.begins[at]) // self.block) * self.block
        return begin, np.minimum(self.begins[at] + within, self.bounds[at + 1])

    def floor(self, at: int) -> int:
        """The beginning of the block that holds a byte."""
        return at - (at - int(self.begins[self._range(at)])) % self.block

    def block_of(self, at: int) -> int:
        """The number of the block that holds a byte."""
        number = self._range(at)
        return int(self.firsts[number]) + (at - int(self.begins[number])) // self.block

    def blocks(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(begin, end, number of the first block) of what each range has of [begin, end), which cuts no block."""
        first = int(self._range(begin))
        stop = int(self.begins.searchsorted(end, "left"))
        found = []
        for number in range(first, stop):
            start = max(int(self.begins[number]), begin)
            block = int(self.firsts[number]) + (start - int(self.begins[number])) // self.block
            found.append((start, min(int(self.bounds[number + 1]), end), block))
        return found


class Blocks:
    """The checksums of a step. Of their file only what is asked for is read.

    Args:
        opened: the step's files.
        order: every tensor, in the order of the manifest's files and of their headers, or of the manifest.

    Raises:
        CheckpointError: the file is missing or damaged, or is of other tensors.
    """

    def __init__(self, opened: Opened, order: Sequence[Tensor]) -> None:
        self._opened = opened
        self._file = opened.header(opened.manifest.checksums)
        self._numbers = {tensor.name: number for number, tensor in enumerate(order)}
        held = self._file.tensors
        if set(held) != {manifest.FIRSTS, manifest.BEGINS, manifest.PLACES, manifest.SUMS}:
            raise self._damaged("it does not have the tensors of checksums")
        ranges, blocks = held[manifest.BEGINS].nbytes // 8, held[manifest.SUMS].nbytes // 4
        due = manifest.checksums_of(len(order), ranges, blocks)
        if due.header != self._file.header:
            raise self._damaged("it is not of these tensors")
        self._firsts = self._read(manifest.FIRSTS, 0, 2 * (len(order) + 1)).reshape(-1, 2)
        counts = np.diff(self._firsts, axis=0)
        most = np.array([min(tensor.nbytes, manifest.MOST_RANGES) for tensor in order], np.int64)
        least = np.minimum(most, 1)
        if (self._firsts[0] != 0).any() or (self._firsts[-1] != (ranges, blocks)).any() or (counts < 0).any():
            raise self._damaged("ranges and blocks are not counted in order")
        if (counts[:, 0] < least).any() or (counts[:, 0] > most).any():
            raise self._damaged("a tensor has no ranges, or more than bytes")
        self._last: tuple[str, Ranges] | None = None
        self._window = 0, np.zeros(0, np.int64)

    def of(self, tensor: Tensor) -> Ranges:
        """The ranges of a tensor that is not empty. Those of one tensor are kept."""
        if self._last is None or self._last[0] != tensor.name:
            self._last = tensor.name, self._ranges(tensor)
        return self._last[1]

    def _ranges(self, tensor: Tensor) -> Ranges:
        number = self._numbers[tensor.name]
        (first, block), (stop, block_stop) = self._firsts[number].tolist(), self._firsts[number + 1].tolist()
        begins = self._read(manifest.BEGINS, first, stop - first)
        ranges = Ranges.of(begins, tensor.nbytes, block)
        lengths = np.diff(ranges.bounds)
        # Compared before they are added up: a difference may have run over.
        is_sorted = begins[0] == 0 and (ranges.bounds[:-1] < ranges.bounds[1:]).all()
        if not is_sorted or int((-(-lengths // BLOCK)).sum()) != block_stop - block:
            raise self._damaged(f"ranges of tensor {tensor.name!r} are not in order", tensor.name)
        return ranges

    def places(self, tensor: Tensor) -> dict[int, int]:
        """The places that wrote a tensor that is not empty, each with its bytes."""
        ranges = self.of(tensor)
        places = self._read(manifest.PLACES, int(self._firsts[self._numbers[tensor.name], 0]), len(ranges.begins))
        found: dict[int, int] = {}
        for place, nbytes in zip(places.tolist(), np.diff(ranges.bounds).tolist(), strict=True):
            found[place] = found.get(place, 0) + nbytes
        return dict(sorted(found.items()))

    def check(self, file: str, tensor: Tensor, ranges: Ranges, begin: int, data: Bytes) -> None:
        """Raises where the bytes of a tensor from `begin` on, whole blocks, do not have their checksums."""
        parts, at, found = ranges.blocks(begin, begin + len(data)), ranges.block_of(begin), array("I")
        for a, b, _ in parts:
            found += sums(data[a - begin : b - begin])
        due = self._due(at, len(found), tensor.name)
        if found.tobytes() == due.tobytes():
            return
        block = at + int((np.frombuffer(found, np.uint32) != due).argmax())
        a, b, first = next(part for part in reversed(parts) if part[2] <= block)
        at = a + (block - first) * BLOCK
        text = f"is damaged: its bytes {at}..{min(at + BLOCK, b)} do not have their checksum"
        raise CheckpointError(f"{file}: tensor {tensor.name!r} {text}", file=file, tensor=tensor.name)

    def ahead(self, ranges: Ranges, begin: int, end: int, most: int) -> None:
        """Reads the checksums of all that is in [begin, end) at once, if they have at most so many bytes."""
        first = ranges.block_of(begin)
        count = ranges.block_of(end - 1) - first + 1
        if count * 4 <= most:
            self._window = first, self._read(manifest.SUMS, first, count)

    def _due(self, first: int, count: int, tensor: str) -> NDArray[np.int64]:
        start, held = self._window
        if start <= first and first + count <= start + len(held):
            return held[first - start : first - start + count]
        return self._read(manifest.SUMS, first, count, tensor)

    def _read(self, what: str, first: int, count: int, tensor: str = "") -> NDArray[np.int64]:
        of = self._file.tensors[what]
        out = np.empty(count * of.itemsize, np.uint8)
        self._opened.read(self._file.name, self._file.begins[what] + first * of.itemsize, out, tensor)
        self._opened.bytes_beside += len(out)
        return out.view(of.dtype)

    def _damaged(self, text: str, tensor: str = "") -> CheckpointError:
        return CheckpointError(f"{self._file.name}: is damaged: {text}", file=self._file.name, tensor=tensor)
