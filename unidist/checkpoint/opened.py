"""The files of a checkpoint that is read: opened when needed, checked by the manifest, counted."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from unidist.checkpoint import disk, manifest
from unidist.checkpoint.checksums import Bytes, crc
from unidist.checkpoint.manifest import Manifest, Told
from unidist.checkpoint.tensors import KINDS, LARGEST_TEXT, FileSpec, parsed, stamp_of
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
        text: the manifest's.

    Attributes:
        manifest: what it says.
        bytes_read: of tensors' data.
        bytes_beside: of manifest, headers and checksums.
    """

    def __init__(self, held: Files, text: bytes) -> None:
        self._held = held
        self.bytes_read, self.bytes_beside = 0, len(text)
        try:
            self.manifest: Manifest = manifest.parsed(text)
        except BaseException:
            held.close()
            raise

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
