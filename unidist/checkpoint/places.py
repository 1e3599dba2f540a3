"""Finds the bytes of a tensor: in one file that holds it whole, or in parts of several processes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from unidist.checkpoint.tensors import FileSpec, Tensor
from unidist.errors import CheckpointError


class Places(Protocol):
    def of(self, name: str, begin: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        """(file, offset in it, first byte, last byte + 1) of all that a tensor has in [begin, end), in order."""


class Whole:
    """Files that hold tensors whole.

    Args:
        files: tensor's name -> its file.
    """

    def __init__(self, files: Mapping[str, FileSpec]) -> None:
        self._files = files

    def of(self, name: str, begin: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        file = self._files[name]
        yield file.name, file.begins[name] + begin, begin, end


class InParts:
    """Files of one process each, which hold ranges of tensors.

    A range has the tensor's name, "@" and the first byte.

    Args:
        tensors: all of them.
        files: all of them.

    Raises:
        CheckpointError: a byte of a tensor is in no file, or in two.
    """

    def __init__(self, tensors: Sequence[Tensor], files: Iterable[FileSpec]) -> None:
        found: dict[str, list[tuple[int, int, str, int]]] = {tensor.name: [] for tensor in tensors}
        for file in files:
            for piece, part in file.tensors.items():
                name, _, begin = piece.rpartition("@")
                if name not in found or not begin.isdecimal():
                    raise CheckpointError(
                        f"{file.name}: holds {piece!r:.200}, which is no part of a tensor", file=file.name
                    )
                first = int(begin)
                found[name].append((first, first + part.nbytes, file.name, file.begins[piece]))
        for tensor in tensors:
            pieces = found[tensor.name]
            pieces.sort()
            ends = [0, *(end for _, end, _, _ in pieces)]
            begins = [*(begin for begin, _, _, _ in pieces), tensor.nbytes]
            if begins != ends:
                at = next(min(a, b) for a, b in zip(begins, ends, strict=True) if a != b)
                text = f"its bytes from {at} on are in no part, or in two"
                raise CheckpointError(f"tensor {tensor.name!r}: {text}", tensor=tensor.name)
        self._pieces = found
        self._begins = {name: [piece[0] for piece in pieces] for name, pieces in found.items()}

    def of(self, name: str, begin: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        pieces = self._pieces[name]
        number = bisect_right(self._begins[name], begin) - 1
        while begin < end:
            first, stop, file, offset = pieces[number]
            last = min(stop, end)
            yield file, offset + begin - first, begin, last
            begin, number = last, number + 1


def piece_of(name: str, begin: int) -> str:
    """Returns the name of a part of a tensor."""
    return f"{name}@{begin}"
