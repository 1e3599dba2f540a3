"""The files of a checkpoint that is read: opened when needed, checked by the manifest, counted.

A tensor is whole in one of them, or in ranges in the parts of several processes.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from unidist.checkpoint import disk, manifest
from unidist.checkpoint.checksums import Bytes, crc
from unidist.checkpoint.manifest import Manifest, Told
from unidist.checkpoint.tensors import KINDS, LARGEST_TEXT, FileSpec, Tensor, parsed, stamp_of
from unidist.errors import CheckpointError

# Files that are open at once; a process may have some hundreds.
_MOST_OPEN = 64
_NAME = re.compile(rf"({'|'.join(KINDS)})-\d{{5,9}}-of-\d{{5,9}}\.safetensors")
_PART = re.compile(r"part-\d{5,9}\.safetensors")
_PIECE = 1 << 20


class Files(Protocol):
    """The files of one step, wherever they are."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises CheckpointError: there is none."""

    def read(self, name: str, offset: int, out: Bytes, tensor: str = "") -> None:
        """Fills `out` with what a file has from a byte on. Raises CheckpointError: it ends before."""

    def close(self) -> None: ...


class FolderFiles:
    """The files of a folder. Reads through descriptors: what is renamed meanwhile is still the same."""

    def __init__(self, folder: Path) -> None:
        self._held: OrderedDict[str, int] = OrderedDict()
        self._folder = disk.open_folder(folder)

    def manifest(self) -> bytes:
        return disk.read_small(manifest.MANIFEST, self._folder, LARGEST_TEXT)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def __del__(self) -> None:
        if hasattr(self, "_folder"):
            self.close()

    def size(self, name: str) -> int:
        return os.fstat(self._open(name)).st_size

    def read(self, name: str, offset: int, out: Bytes, tensor: str = "") -> None:
        disk.read_into(self._open(name), out.data, offset, name, tensor)

    def _open(self, name: str) -> int:
        held = self._held.get(name)
        if held is None:
            if len(self._held) >= _MOST_OPEN:
                os.close(self._held.popitem(last=False)[1])
            held = self._held[name] = disk.open_regular(name, self._folder)
        return held


class Opened:
    """A step's files, which are checked against its manifest.

    Args:
        held: the files.
        told: what the manifest says.
        nbytes: the manifest's.

    Attributes:
        bytes_read: of tensors' data.
        bytes_beside: of manifest, headers and checksums.
    """

    def __init__(self, held: Files, told: Manifest, nbytes: int) -> None:
        self._held, self.manifest = held, told
        self.bytes_read, self.bytes_beside = 0, nbytes

    def close(self) -> None:
        self._held.close()

    def files(self) -> Iterator[FileSpec]:
        """The files of tensors, as their headers tell."""
        seen: set[str] = set()
        known = _PART if self.manifest.folder else _NAME
        for told in self.manifest.files:
            if not known.fullmatch(told.name) or told.name in seen:
                text = f"names a file that is none of a checkpoint, or twice: {told.name!r:.200}"
                raise CheckpointError(f"{manifest.MANIFEST}: {text}", file=manifest.MANIFEST)
            seen.add(told.name)
            yield self.header(told)

    def header(self, told: Told) -> FileSpec:
        """A file's header, which is what was written."""
        name = told.name
        size = self._held.size(name)
        if not 16 <= told.length <= LARGEST_TEXT + 16:
            raise CheckpointError(f"{name}: its header would have {told.length} bytes", file=name)
        found = self._beginning(name, min(told.length, size))
        stamp, due = stamp_of(found), (self.manifest.step, self.manifest.writing)
        if stamp is not None and stamp[0] != due[0]:
            raise CheckpointError(f"{name}: is a file of step {stamp[0]}, not of {due[0]}", file=name)
        if size != told.size:
            how = "cut short" if size < told.size else "too long"
            raise CheckpointError(f"{name}: is {how}: it has {size} bytes, {told.size} were written", file=name)
        if stamp is not None and stamp != due:
            raise CheckpointError(f"{name}: is of another writing of step {stamp[0]}", file=name)
        # That of the checksums' file is of all of it; who opens it compares its header with what is due.
        if name != manifest.CHECKSUMS and crc(found) != told.crc32c:
            raise CheckpointError(f"{name}: its header is damaged: the checksum differs", file=name)
        if int.from_bytes(found[:8], "little") != told.length - 8:
            raise CheckpointError(f"{name}: its header does not have the length that it names", file=name)
        return parsed(name, found, size)

    def _beginning(self, name: str, count: int) -> bytes:
        out = np.empty(count, np.uint8)
        self._held.read(name, 0, out)
        self.bytes_beside += count
        return out.tobytes()

    def check_whole(self, told: Told) -> None:
        """A file beside the tensors' is what was written, from its first byte to its last."""
        size = self._held.size(told.name)
        if size != told.size:
            raise CheckpointError(f"{told.name}: has {size} bytes, {told.size} were written", file=told.name)
        number = 0
        for begin in range(0, size, _PIECE):
            piece = np.empty(min(_PIECE, size - begin), np.uint8)
            self._held.read(told.name, begin, piece)
            self.bytes_beside += len(piece)
            number = crc(piece, number)
        if number != told.crc32c:
            raise CheckpointError(f"{told.name}: is damaged: its checksum differs", file=told.name)

    def read(self, name: str, offset: int, out: Bytes, tensor: str) -> None:
        """Fills `out` with what a file has from a byte on."""
        self._held.read(name, offset, out, tensor)


# First byte, last + 1, file, offset in it.
Piece = tuple[int, int, str, int]


class Pieces:
    """The files in which each tensor's bytes are.

    Attributes:
        tensors: name -> the tensor, in order.

    Raises:
        CheckpointError: a byte of a tensor is in no file, or in two; a file holds what is none.
    """

    def __init__(self, told: Manifest, files: Iterable[FileSpec]) -> None:
        self.tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in told.tensors}
        found: dict[str, list[Piece]] = {name: [] for name in self.tensors}
        for file in files:
            for key, held in file.tensors.items():
                name, _, begin = key.rpartition("@") if told.folder else (key, "", "0")
                if told.folder and (name not in found or not re.fullmatch(r"[0-9]{1,19}", begin)):
                    text = f"holds {key!r:.200}, which is no part of a tensor"
                    raise CheckpointError(f"{file.name}: {text}", file=file.name)
                if not told.folder and name in found:
                    raise CheckpointError(f"{file.name}: has {name!r:.200} a second time", file=file.name, tensor=name)
                self.tensors.setdefault(name, held)
                found.setdefault(name, []).append((int(begin), int(begin) + held.nbytes, file.name, file.begins[key]))
        self._found = _checked(self.tensors, found)
        self._begins = {name: [piece[0] for piece in pieces] for name, pieces in found.items()}

    def of(self, name: str, begin: int, end: int) -> Iterator[Piece]:
        """Yields all that a tensor has in [begin, end), in order."""
        pieces = self._found[name]
        number = bisect_right(self._begins[name], begin) - 1
        while begin < end:
            first, stop, file, offset = pieces[number]
            last = min(stop, end)
            yield begin, last, file, offset + begin - first
            begin, number = last, number + 1


def _checked(tensors: Mapping[str, Tensor], found: dict[str, list[Piece]]) -> Mapping[str, list[Piece]]:
    for name, pieces in found.items():
        pieces.sort()
        ends = [0, *(piece[1] for piece in pieces)]
        begins = [*(piece[0] for piece in pieces), tensors[name].nbytes]
        if begins != ends:
            at = next(min(a, b) for a, b in zip(begins, ends, strict=True) if a != b)
            raise CheckpointError(f"tensor {name!r}: its bytes from {at} on are in no part, or in two", tensor=name)
    return found


def piece_of(name: str, begin: int) -> str:
    """Returns the name of a part of a tensor in a file of parts."""
    return f"{name}@{begin}"
