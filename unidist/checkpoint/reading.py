"""Reads any region of any tensor of a step: its bytes, and what their checksums need, no more.

For each contiguous run at most 1.01 times its bytes and 4 KiB are read. Runs with gaps that fit into that are read as
one. Beside the array that is asked for, a MiB or two are held, and where each range of one tensor begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint import manifest
from unidist.checkpoint.blocks import Blocks, Ranges
from unidist.checkpoint.checksums import Bytes
from unidist.checkpoint.directory import Step
from unidist.checkpoint.opened import Pieces
from unidist.checkpoint.regions import Region, batches, check, whole
from unidist.checkpoint.remote import directory_of
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError

Verify = Literal["read", "all", "off"]
# Read at once: it stays in the core's cache while its checksums are counted.
_PIECE = 1 << 20
_SLACK = 4096
# Checksums that are read at once for many runs.
_MOST_AHEAD = 16 << 20
# Runs of fewer bytes are taken out of what was read by their numbers, longer ones one by one.
_SHORT = 512
_Offsets = NDArray[np.int64]


class Reader:
    """A step of a directory of checkpoints.

    Args:
        directory: of the checkpoints, or their address; or, for the latest, the folder of a step.
        step: its number, or "latest".
        verify: "read": the checksums of what is read; "all": those of the whole step, now; "off": none but those of
            manifest and headers.

    Attributes:
        folder: of the step; its address in an object store.
        step: its number.
        facts: what the caller of `commit` gave.
        tensors: name -> the tensor.

    Raises:
        CheckpointError: there is no such step; or a file is missing, cut short, damaged or of another step.

    Example:
        >>> Reader("/no/such/directory")
        Traceback (most recent call last):
        unidist.errors.CheckpointError: /no/such/directory has no checkpoint
    """

    def __init__(self, directory: str | Path, step: Step = "latest", verify: Verify = "read") -> None:
        if verify not in ("read", "all", "off"):
            raise CheckpointError(f'verify is "read", "all" or "off", got {verify!r}')
        self.folder, self._opened = directory_of(directory).opened(step)
        self._blocks: Blocks | None = None
        try:
            self._look()
            if verify != "off":
                self._checked()
            if verify == "all":
                self.verify()
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        told = self._opened.manifest
        self.step, self.facts = told.step, dict(told.facts)
        self._pieces = Pieces(told, self._opened.files())
        self.tensors: Mapping[str, Tensor] = self._pieces.tensors
        for file_told, name in ((told.checksums, manifest.CHECKSUMS), (told.index, manifest.INDEX)):
            if file_told.name != name:
                raise CheckpointError(f"{manifest.MANIFEST}: {name} is not in it", file=manifest.MANIFEST)

    def _checked(self) -> Blocks:
        if self._blocks is None:
            self._blocks = Blocks(self._opened, list(self.tensors.values()))
        return self._blocks

    def verify(self) -> None:
        """Every byte of every file is what was written.

        Raises:
            CheckpointError: one is not; it names the file and the tensor.
        """
        blocks = self._checked()
        self._opened.check_whole(self._opened.manifest.index)
        self._opened.check_whole(self._opened.manifest.checksums)
        scratch = np.empty(_PIECE, np.uint8)
        for name, tensor in self.tensors.items():
            if tensor.nbytes:
                ranges = blocks.of(tensor)
                for begin, end in _cut(ranges, 0, tensor.nbytes):
                    self._fill(name, begin, end, scratch[: end - begin], ranges)

    def read(self, name: str, region: Region | None = None) -> Bytes:
        """The bytes of a region, row major.

        Args:
            name: the tensor's.
            region: (first index, how many) for each dim; without it, the whole tensor.

        Raises:
            CheckpointError: there is no such tensor or region, or what is there is not what was written.
        """
        _, region, nbytes = self._asked(name, region)
        out = np.empty(nbytes, np.uint8)
        self.read_into(name, region, out)
        return out

    def read_into(self, name: str, region: Region | None, out: Bytes) -> None:
        """As `read`, into an array of bytes that is there."""
        tensor, region, nbytes = self._asked(name, region)
        if out.dtype != np.uint8 or out.shape != (nbytes,) or not out.flags.c_contiguous:
            text = f"the region has {nbytes} bytes; the array is of {out.dtype}, {out.shape}"
            raise CheckpointError(f"tensor {name!r}: {text}", tensor=name)
        at = 0
        for offsets, length in batches(tensor.shape, tensor.itemsize, region):
            self._read_runs(name, self._ranges(tensor), offsets, length, out[at : at + len(offsets) * length])
            at += len(offsets) * length

    def _asked(self, name: str, region: Region | None) -> tuple[Tensor, Region, int]:
        tensor = self._tensor(name)
        region = whole(tensor.shape) if region is None else region
        check(tensor.shape, region)
        return tensor, region, math.prod(n for _, n in region) * tensor.itemsize

    def read_bytes(self, name: str, begin: int, nbytes: int) -> Bytes:
        """So many bytes of a tensor, from one on: to go through a large one piece by piece."""
        tensor = self._tensor(name)
        if not 0 <= begin <= begin + nbytes <= tensor.nbytes:
            text = f"has {tensor.nbytes} bytes, and {begin}..{begin + nbytes} were asked for"
            raise CheckpointError(f"tensor {name!r} {text}", tensor=name)
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self._read_runs(name, self._ranges(tensor), np.array([begin]), nbytes, out)
        return out

    def written_by(self, name: str) -> dict[int, int]:
        """Returns who wrote a tensor: the places of processes, each with how many bytes."""
        tensor = self._tensor(name)
        return self._checked().places(tensor) if tensor.nbytes else {}

    def _ranges(self, tensor: Tensor) -> Ranges:
        return self._blocks.of(tensor) if self._blocks is not None else Ranges.whole(tensor)

    def _tensor(self, name: str) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}", file=str(self.folder), tensor=name)
        return tensor

    def _read_runs(self, name: str, ranges: Ranges, offsets: _Offsets, length: int, out: Bytes) -> None:
        begins, ends = ranges.around(offsets, length)
        beside = ends - begins - length
        joined = begins[1:] - ends[:-1] + beside[:-1] <= _SLACK
        firsts = np.concatenate([[0], np.flatnonzero(~joined) + 1, [len(offsets)]])
        starts, stops = begins[firsts[:-1]], np.maximum.reduceat(ends, firsts[:-1])
        if self._blocks is not None and len(offsets) > 1:
            left = len(offsets) * (length + length // 100 + _SLACK) - int((stops - starts).sum())
            self._blocks.ahead(ranges, int(starts[0]), int(stops[-1]), min(left, _MOST_AHEAD))
        for first, stop, start, its_stop in zip(
            firsts[:-1].tolist(), firsts[1:].tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            for begin, end in _cut(ranges, start, its_stop):
                self._read_piece(name, ranges, begin, end, offsets[first:stop], length, out[first * length :])

    def _read_piece(
        self, name: str, ranges: Ranges, begin: int, end: int, offsets: _Offsets, length: int, out: Bytes
    ) -> None:
        first = max(int(offsets.searchsorted(begin, "right")) - 1, 0) if len(offsets) > 1 else 0
        at = int(offsets[first])
        if at <= begin and end <= at + length:
            to = first * length + begin - at
            self._fill(name, begin, end, out[to : to + end - begin], ranges)
            return
        piece = np.empty(end - begin, np.uint8)
        self._fill(name, begin, end, piece, ranges)
        _take(piece, begin, end, offsets, length, out)

    def _fill(self, name: str, begin: int, end: int, out: Bytes, ranges: Ranges) -> None:
        file = ""
        for first, stop, file, offset in self._pieces.of(name, begin, end):
            self._opened.read(file, offset, out[first - begin : stop - begin], name)
        self._opened.bytes_read += end - begin
        if self._blocks is not None:
            self._blocks.check(file, self.tensors[name], ranges, begin, out)

    @property
    def where(self) -> str:
        """The directory of checkpoints that the step is in."""
        return str(self.folder.parent) if isinstance(self.folder, Path) else self.folder.rpartition("/")[0]

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far, with those that only checksums needed."""
        return self._opened.bytes_read

    @property
    def bytes_beside(self) -> int:
        """Bytes of the manifest, of headers and of checksums that were read so far."""
        return self._opened.bytes_beside

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _cut(ranges: Ranges, begin: int, end: int) -> Iterator[tuple[int, int]]:
    while end - begin > _PIECE:
        stop = ranges.floor(begin + _PIECE)
        yield begin, stop
        begin = stop
    yield begin, end


def _take(piece: Bytes, begin: int, end: int, offsets: _Offsets, length: int, out: Bytes) -> None:
    if len(offsets) == 1:
        only = int(offsets[0])
        a, b = max(only, begin), min(only + length, end)
        out[a - only : b - only] = piece[a - begin : b - begin]
        return
    first = int(np.searchsorted(offsets, begin - length, "right"))
    stop = int(np.searchsorted(offsets, end, "left"))
    whole_ones = (offsets[first:stop] >= begin) & (offsets[first:stop] + length <= end)
    if length < _SHORT and whole_ones.any():
        start, count = first + int(whole_ones.argmax()), int(whole_ones.sum())
        at = offsets[start : start + count, None] - begin + np.arange(length)
        out[start * length : (start + count) * length] = piece[at].reshape(-1)
        left = np.flatnonzero(~whole_ones) + first
    else:
        left = np.arange(first, stop)
    for number, offset in zip(left.tolist(), offsets[left].tolist(), strict=True):
        a, b = max(offset, begin), min(offset + length, end)
        to = number * length - offset
        out[to + a : to + b] = piece[a - begin : b - begin]
