"""Writing one step: process 0 prepares it, each process writes its bytes, process 0 commits.

All happens in `step-00000012.tmp`. What a process wrote is on the disk before it says so (`part-<place>.json`); the
manifest is written when all have said so, and then the folder gets its name. Until then nothing of it counts. What only
informs processes of each other is gone by then, and need not come to the disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unidist.checkpoint import disk, folders
from unidist.checkpoint.checksums import Bytes, Running, crc
from unidist.checkpoint.early import Early
from unidist.checkpoint.joining import Part, joined
from unidist.checkpoint.manifest import CHECKSUMS, INDEX, MANIFEST, Manifest, Told, index_of, text_of
from unidist.checkpoint.tensors import LARGEST_TEXT, FileSpec, Tensor, parse_json, stamped
from unidist.errors import CheckpointError

PREPARED = "prepared.json"
# Checksums are counted of what is written next, while it is in the core's cache.
_PIECE = 1 << 20


def prepare(directory: str | Path, step: int, files: Sequence[FileSpec]) -> Path:
    """Makes the folder in which all processes write a step, with each file's header and size. Process 0's.

    What an earlier try has left there is removed. Other processes begin when this is done.

    Returns:
        The folder.

    Raises:
        CheckpointError: what the system says: no such folder, no right to write, no space.
    """
    where = Path(directory)
    folder = folders.folder_of(where, step, folders.TMP)
    with disk.told(where):
        where.mkdir(parents=True, exist_ok=True)
    with disk.told(folder):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    writing = secrets.token_hex(16)
    for file in files:
        path = folder / file.name
        with disk.told(path), path.open("xb") as opened:
            opened.write(stamped(file.header, step, writing))
            opened.truncate(file.size)
    told = {"step": step, "writing": writing, "plan": _plan(files)}
    disk.write_whole(folder, PREPARED, json.dumps(told).encode())
    return folder


def _plan(files: Sequence[FileSpec]) -> int:
    """A number that differs where processes know other files."""
    found = 0
    for file in files:
        found = crc(file.header, crc(file.name.encode(), found))
    return found


def _prepared(folder: Path, files: Sequence[FileSpec]) -> tuple[int, str]:
    """(step, number of the writing) of a folder that is prepared.

    Raises:
        CheckpointError: it is not, or for other tensors.
    """
    match parse_json(_small(folder, PREPARED), PREPARED):
        case {"step": int() as step, "writing": str() as writing, "plan": int() as plan}:
            if plan != _plan(files):
                raise CheckpointError(
                    f"{folder}: was prepared for other tensors than this process has", file=str(folder)
                )
            return step, writing
    raise CheckpointError(f"{folder / PREPARED}: does not say what is written", file=PREPARED)


def _small(folder: Path, name: str) -> bytes:
    opened = disk.open_folder(folder)
    try:
        return disk.read_small(name, opened, LARGEST_TEXT)
    finally:
        os.close(opened)


class PartWriter:
    """Writes the part of a step that one process has.

    Args:
        folder: of `prepare`.
        files: of `files_of`, as in all other processes.
        place: this process's number, from 0.

    Raises:
        CheckpointError: the folder was not prepared, or for other tensors.
    """

    def __init__(self, folder: Path, files: Sequence[FileSpec], place: int) -> None:
        self.folder, self.place = Path(folder), place
        _, self._writing = _prepared(self.folder, files)
        self._files = {name: file for file in files for name in file.tensors}
        self._opened: dict[str, Early] = {}
        self._ranges: dict[str, list[Running]] = {}

    def write(self, name: str, begin: int, data: Any) -> None:
        """Writes the bytes [begin, begin + length of `data`) of a tensor.

        Args:
            name: the tensor's.
            begin: the first byte, of the whole row-major tensor.
            data: a contiguous array of NumPy, or bytes.

        Raises:
            CheckpointError: there is no such tensor, it has no such bytes, or the system cannot write them.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r} to write", tensor=name)
        content = as_bytes(data)
        nbytes = file.tensors[name].nbytes
        if not 0 <= begin <= begin + len(content) <= nbytes:
            text = f"has {nbytes} bytes, and {begin}..{begin + len(content)} were to be written"
            raise CheckpointError(f"{file.name}: tensor {name!r} {text}", file=file.name, tensor=name)
        if not len(content):
            return
        running = self._running(name, begin)
        opened = self._open(file)
        for first in range(0, len(content), _PIECE):
            piece, at = content[first : first + _PIECE], file.begins[name] + begin + first
            running.add(piece)
            try:
                write_all(opened.descriptor, piece, at)
            except OSError as error:
                raise disk.error_of(self.folder / file.name, error, name) from error
            opened.wrote(at, at + len(piece))

    def _running(self, name: str, begin: int) -> Running:
        ranges = self._ranges.setdefault(name, [])
        if not ranges or ranges[-1].end != begin:
            ranges.append(Running(begin))
        return ranges[-1]

    def _open(self, file: FileSpec) -> Early:
        opened = self._opened.get(file.name)
        if opened is None:
            folder = disk.open_folder(self.folder)
            try:
                opened = Early(disk.open_regular(file.name, folder, os.O_WRONLY))
                self._opened[file.name] = opened
            finally:
                os.close(folder)
        return opened

    def finish(self) -> None:
        """All that was written is on the disk, and then the file that says so.

        Raises:
            CheckpointError: the system cannot write it.
        """
        for name, opened in self._opened.items():
            with disk.told(self.folder / name):
                os.fsync(opened.descriptor)
        self.close()
        part = Part.of(self._ranges)
        disk.write_whole(self.folder, binary_of(self.place), part.content)
        told = {"writing": self._writing, "place": self.place, "crc32c": crc(part.content), **part.told}
        disk.write_whole(self.folder, part_of(self.place), json.dumps(told).encode())

    def close(self) -> None:
        """Lets the files go; `finish` does it too."""
        while self._opened:
            os.close(self._opened.popitem()[1].descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self.close()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_bytes(data: Any) -> Bytes:
    """The bytes of a contiguous array, or of anything that lends its memory, without a copy."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise CheckpointError(f"an array of strides {data.strides} is no run of bytes")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def write_all(opened: int, data: Bytes, offset: int) -> None:
    """Writes all bytes, however many the system takes at once."""
    left = data.data
    while len(left):
        written = os.pwrite(opened, left, offset)
        left, offset = left[written:], offset + written


def part_of(place: int) -> str:
    return f"part-{place}.json"


def binary_of(place: int) -> str:
    return f"part-{place}.bin"


def commit(folder: str | Path, files: Sequence[FileSpec], facts: Mapping[str, Any], places: int) -> Path:
    """Makes a step count, when every process has finished its part. Process 0's.

    Args:
        folder: of `prepare`.
        files: of `files_of`.
        facts: JSON of the caller's own, kept in the manifest.
        places: how many processes wrote.

    Returns:
        The step's folder, under its name.

    Raises:
        CheckpointError: a part is missing or of another try; bytes of a tensor were not written, or twice; the system
            cannot write.
    """
    here = Path(folder)
    step, writing = _prepared(here, files)
    parts = [_part(here, place, writing) for place in range(places)]
    told = tuple(_header(here, file, step, writing) for file in files)
    tensors = [(file.name, tensor) for file in files for tensor in file.tensors.values()]
    checksums = _write_checksums(here, tensors, parts)
    index = index_of(files)
    # With the manifest, the folder comes to the disk, which has the names of all.
    disk.write_whole(here, INDEX, index, is_kept=True)
    manifest = Manifest(step, writing, told, checksums, Told(INDEX, len(index), len(index), crc(index)), facts)
    text = text_of(manifest)
    for name in [PREPARED, *(of(place) for of in (part_of, binary_of) for place in range(places))]:
        with disk.told(here / name):
            (here / name).unlink()
    disk.write_durably(here, MANIFEST, text)
    return _stand(here, step)


def _part(folder: Path, place: int, writing: str) -> Part:
    """Returns what a process wrote, as its files say."""
    name = part_of(place)
    found = parse_json(_small(folder, name), name)
    if not isinstance(found, dict) or found.get("writing") != writing or found.get("place") != place:
        raise CheckpointError(f"{name}: is of another try to write this step", file=name)
    with disk.told(folder / binary_of(place)):
        content = np.fromfile(folder / binary_of(place), np.uint8)
    if crc(content) != found["crc32c"]:
        raise CheckpointError(f"{binary_of(place)}: is damaged: its checksum differs", file=binary_of(place))
    return Part.read(place, found, content)


def _header(folder: Path, file: FileSpec, step: int, writing: str) -> Told:
    """Returns what the manifest will say of a file, which still has the header and size it was given.

    The file comes to the disk here where nobody has written into it.
    """
    due = stamped(file.header, step, writing)
    opened_folder = disk.open_folder(folder)
    try:
        opened = disk.open_regular(file.name, opened_folder)
        try:
            size = os.fstat(opened).st_size
            found = disk.read_exactly(opened, len(due), 0, file.name)
            with disk.told(file.name):
                os.fsync(opened)
        finally:
            os.close(opened)
    finally:
        os.close(opened_folder)
    if size != file.size or found != due:
        raise CheckpointError(f"{file.name}: is not the file that was prepared", file=file.name)
    return Told(file.name, size, len(due), crc(due))


def _write_checksums(folder: Path, tensors: Sequence[tuple[str, Tensor]], parts: Sequence[Part]) -> Told:
    spec, pieces = joined(tensors, parts)
    path, number, size = folder / CHECKSUMS, 0, 0
    with disk.told(path), path.open("xb") as file:
        for piece in _all(spec.header, pieces):
            file.write(piece)
            number, size = crc(piece, number), size + len(piece)
        file.flush()
        os.fsync(file.fileno())
    assert size == spec.size
    return Told(CHECKSUMS, size, len(spec.header), number)


def _all(header: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    yield header
    yield from pieces


def _stand(folder: Path, step: int) -> Path:
    """Gives a finished folder its name.

    One that counts and has this name gives way, and counts until then.
    """
    directory = folder.parent
    final, replaced = (folders.folder_of(directory, step, suffix) for suffix in ("", folders.REPLACED))
    with disk.told(final):
        if final.exists() and not (final / MANIFEST).exists():
            folders.remove(directory, step, "")
        if final.exists():
            if replaced.exists():
                folders.remove(directory, step, folders.REPLACED)
            final.rename(replaced)
        folder.rename(final)
        disk.sync_folder(directory)
        if replaced.exists():
            folders.remove(directory, step, folders.REPLACED)
    return final
