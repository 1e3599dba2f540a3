"""Puts together what processes wrote: every byte of every tensor once, checksums in tensors' order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint.checksums import BLOCK, Bytes, Running
from unidist.checkpoint.manifest import BEGINS, FIRSTS, MOST_RANGES, PLACES, SUMS, checksums_of
from unidist.checkpoint.tensors import FileSpec, Tensor
from unidist.errors import CheckpointError

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """The ranges that one process wrote, and their blocks' checksums.

    Attributes:
        place: the process's.
        names: of its tensors, each with how many ranges it wrote of it.
        begins: of each range, in its tensor.
        ends: of each range.
        sums: of each range's blocks.
    """

    place: int
    names: list[tuple[str, int]]
    begins: Numbers
    ends: Numbers
    sums: NDArray[np.uint32]

    @classmethod
    def of(cls, ranges: Mapping[str, Sequence[Running]]) -> Part:
        every = [one for of_tensor in ranges.values() for one in of_tensor]
        sums = [np.frombuffer(one.sums, np.uint32) for one in every]
        return cls(
            0,
            [(name, len(of_tensor)) for name, of_tensor in ranges.items()],
            np.array([one.begin for one in every], np.int64),
            np.array([one.end for one in every], np.int64),
            np.concatenate(sums) if sums else np.zeros(0, np.uint32),
        )

    @classmethod
    def read(cls, place: int, told: Mapping[str, Any], content: Bytes) -> Part:
        names = [(name, count) for name, count in told["tensors"]]
        total = sum(count for _, count in names)
        begins, ends = content[: 16 * total].view(np.int64).reshape(2, total)
        return cls(place, names, begins, ends, content[16 * total :].view(np.uint32))

    @property
    def content(self) -> bytes:
        """The content of the part's binary file."""
        return b"".join(one.tobytes() for one in (self.begins, self.ends, self.sums))

    @property
    def told(self) -> dict[str, object]:
        """The content of the part's JSON."""
        return {"tensors": self.names}


def joined(tensors: Sequence[tuple[str, Tensor]], parts: Sequence[Part]) -> tuple[FileSpec, Iterator[bytes]]:
    """The file of the checksums, and its bytes after the header.

    Args:
        tensors: each with the name of its file, in order.
        parts: of all processes, in order.

    Raises:
        CheckpointError: a byte was not written, or twice.
    """
    numbers = {tensor.name: number for number, (_, tensor) in enumerate(tensors)}
    of, places, firsts = [], [], []
    for number, part in enumerate(parts):
        counts = [count for _, count in part.names]
        of.append(np.repeat([numbers[name] for name, _ in part.names], counts).astype(np.int64))
        places.append(np.full(sum(counts), number, np.int64))
        blocks = -(-(part.ends - part.begins) // BLOCK)
        firsts.append(np.cumsum(blocks) - blocks)
    tensor, place, first = (np.concatenate(one) for one in (of, places, firsts))
    begin, end = np.concatenate([one.begins for one in parts]), np.concatenate([one.ends for one in parts])
    order = np.lexsort((begin, tensor))
    tensor, place, first, begin, end = (one[order] for one in (tensor, place, first, begin, end))
    counts_of = np.bincount(tensor, minlength=len(tensors))
    _check(tensors, counts_of, begin, end)
    blocks = -(-(end - begin) // BLOCK)
    table = np.zeros((len(tensors) + 1, 2), np.int64)
    np.cumsum(counts_of, out=table[1:, 0])
    table[:, 1] = np.concatenate([[0], np.cumsum(blocks)])[table[:, 0]]
    spec = checksums_of(len(tensors), len(begin), int(blocks.sum()))
    content = {FIRSTS: table.tobytes(), BEGINS: begin.tobytes(), PLACES: place.astype(np.uint32).tobytes()}

    def pieces() -> Iterator[bytes]:
        for name in spec.tensors:
            if name != SUMS:
                yield content[name]
                continue
            for source, start, count in zip(place.tolist(), first.tolist(), blocks.tolist(), strict=True):
                yield parts[source].sums[start : start + count].tobytes()

    return spec, pieces()


def _check(tensors: Sequence[tuple[str, Tensor]], counts: Numbers, begin: Numbers, end: Numbers) -> None:
    """Raises where the ranges of a tensor are not all of its bytes, each once."""
    stop = 0
    for (file, tensor), count in zip(tensors, counts.tolist(), strict=True):
        start, stop = stop, stop + count
        due = np.append(end[start:stop], 0)
        due[1:], due[0] = due[:-1].copy(), 0
        found = np.append(begin[start:stop], tensor.nbytes)
        wrong = np.flatnonzero(found != due)
        if len(wrong):
            a, b = int(due[wrong[0]]), int(found[wrong[0]])
            text = f"bytes {a}..{b} were not written" if a < b else f"bytes {b}..{a} were written twice"
            raise CheckpointError(f"{file}: tensor {tensor.name!r}: {text}", file=file, tensor=tensor.name)
        if count > MOST_RANGES:
            text = f"was written in {count} ranges; {MOST_RANGES} is the most"
            raise CheckpointError(f"{file}: tensor {tensor.name!r} {text}", file=file, tensor=tensor.name)
