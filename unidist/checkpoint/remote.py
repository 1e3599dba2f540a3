"""Steps in object stores, where no file is written in its middle, and nothing can be renamed.

    run/
      step-00000012.json              the manifest: with it, the step counts
      step-00000012-1f0c.../          drawn by chance for each writing
        part-00000.safetensors        what process 0 wrote: ranges of tensors, each under its tensor's name and byte
        part-00001.safetensors
        checksums.safetensors
        model.safetensors.index.json  which parts have which of the model's tensors

A part is a plain safetensors file; `unidist checkpoint export` makes whole tensors of all of them. A step that is
written anew has a folder of its own, and its manifest takes the place of the one before in one go.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from unidist.checkpoint import manifest
from unidist.checkpoint.checksums import Bytes, crc
from unidist.checkpoint.directory import Directory, Step, name_of
from unidist.checkpoint.folders import FolderDirectory
from unidist.checkpoint.manifest import Told
from unidist.checkpoint.opened import Opened, piece_of
from unidist.checkpoint.stores import Store, StoreFiles, is_address
from unidist.checkpoint.tensors import LARGEST_TEXT, FileSpec, Tensor, file_of, stamped
from unidist.checkpoint.writing import Gathered, Part, PartWriter
from unidist.errors import CheckpointError

_MANIFEST = re.compile(r"step-(\d{8,12})\.json")
_FOLDER = re.compile(r"step-(\d{8,12})-([0-9a-f]{32})")
_PIECE = 16 << 20


class RemoteDirectory(Directory):
    """A directory of an object store.

    Args:
        address: of it.
    """

    is_in_parts = True

    def __init__(self, address: str) -> None:
        self._store = Store(address)
        super().__init__(self._store.address)

    def steps(self) -> list[int]:
        return sorted(int(found[1]) for name in self._store.names() if (found := _MANIFEST.fullmatch(name)))

    def find(self, step: Step) -> str:
        return f"{self.where}/{name_of(self.number(step))}.json"

    def opened(self, step: Step) -> tuple[str, Opened]:
        number = self.number(step)
        name = f"{name_of(number)}.json"
        if (size := self._store.size(name)) > LARGEST_TEXT:
            raise CheckpointError(f"{name}: has {size} bytes; {LARGEST_TEXT} is the most", file=name)
        text = self._store.read(name)
        told = manifest.parsed(text, number)
        if _FOLDER.fullmatch(told.folder) is None:
            raise CheckpointError(f"{name}: has its files in {told.folder!r:.100}", file=name)
        return f"{self.where}/{told.folder}", Opened(StoreFiles(self._store, told.folder), told, len(text))

    # writing ----------------------------------------------------------------------------------------------------------

    def prepare(self, step: int, files: Sequence[FileSpec]) -> str:
        """The name under which all write: nothing is made."""
        return f"{name_of(step)}-{secrets.token_hex(16)}"

    def writer(self, name: str, files: Sequence[FileSpec], place: int) -> RemoteWriter:
        return RemoteWriter(self._store, name, files, place, self._begun(name, files))

    def _begun(self, name: str, files: Sequence[FileSpec]) -> tuple[int, str]:
        found = _FOLDER.fullmatch(name)
        assert found is not None
        return int(found[1]), found[2]

    def _read(self, name: str, part: str) -> bytes:
        return self._store.read(f"{name}/{part}")

    def _described(
        self, name: str, begun: tuple[int, str], files: Sequence[FileSpec], parts: Sequence[Part]
    ) -> tuple[tuple[Told, ...], bytes]:
        told = tuple(part.file for part in parts if part.file is not None)
        if len(told) < len(parts):
            raise CheckpointError(f"{name}: a process does not say which file it wrote", file=name)
        of: dict[str, list[str]] = {one: [] for file in files if file.kind == "model" for one in file.tensors}
        for file, part in zip(told, parts, strict=True):
            for one in of.keys() & dict(part.names):
                of[one].append(file.name)
        return told, json.dumps({"parts": of}, indent=2).encode() + b"\n"

    def _write(self, name: str, file: str, content: Iterable[bytes]) -> None:
        self._store.write(f"{name}/{file}", content)

    def _stand(self, name: str, step: int, manifest: bytes, parts: Sequence[str]) -> str:
        self._store.write(f"{name_of(step)}.json", [manifest])
        for part in parts:
            self._store.remove(f"{name}/{part}")
        for found in self._store.names():
            if found.startswith(f"{name_of(step)}-") and found != name:
                self._store.remove(found)
        return f"{self.where}/{name_of(step)}.json"

    # removing ---------------------------------------------------------------------------------------------------------

    def _remove(self, step: int) -> None:
        self._store.remove(f"{name_of(step)}.json")

    def _clear(self, newest: int) -> None:
        there = self.steps()
        for name in self._store.names():
            found = _FOLDER.fullmatch(name)
            if found and int(found[1]) < newest and int(found[1]) not in there:
                self._store.remove(name)


class RemoteWriter(PartWriter):
    """Writes the part of a step that one process has as one object.

    It is gathered in a file on this machine: a store takes an object from its first byte to its last, and that one
    describes all others.
    """

    def __init__(
        self, store: Store, folder: str, files: Sequence[FileSpec], place: int, begun: tuple[int, str]
    ) -> None:
        super().__init__(files, place, begun[1])
        self._store, self._folder, self._begun = store, folder, begun
        self._file = tempfile.TemporaryFile(prefix="unidist-part-")  # noqa: SIM115 (close closes it)
        self._gathered = Gathered(self._file.fileno(), tempfile.gettempdir())

    def _put(self, file: FileSpec, tensor: Tensor, begin: int, piece: Bytes) -> None:
        self._gathered.write(tensor.name, begin, piece)

    def _keep(self) -> Told:
        name, where, at, held = f"part-{self.place:05d}.safetensors", {}, 0, []
        for of, begin, nbytes in self._gathered.pieces:
            held.append(_as_tensor(self._files[of].tensors[of], begin, nbytes))
            where[held[-1].name], at = at, at + nbytes
        spec = file_of(name, held)
        header = stamped(spec.header, *self._begun)

        def content() -> Iterator[bytes]:
            yield header
            for piece, tensor in spec.tensors.items():
                self._file.seek(where[piece])
                for left in range(tensor.nbytes, 0, -_PIECE):
                    yield self._file.read(min(_PIECE, left))

        self._store.write(f"{self._folder}/{name}", content())
        return Told(name, spec.size, len(header), crc(header))

    def _describe(self, name: str, text: bytes) -> None:
        self._store.write(f"{self._folder}/{name}", [text])

    def close(self) -> None:
        self._file.close()


def _as_tensor(tensor: Tensor, begin: int, nbytes: int) -> Tensor:
    """A range of a tensor, as a tensor; one of bytes where it ends inside an item."""
    count, rest = divmod(nbytes, tensor.itemsize)
    dtype, count = ("uint8", nbytes) if rest else (tensor.dtype, count)
    return Tensor(piece_of(tensor.name, begin), dtype, (count,), tensor.kind)


def directory_of(where: str | os.PathLike[str]) -> Directory:
    """Returns the directory of checkpoints that a path or an address names.

    Raises:
        CheckpointError: an address of a store that cannot be used here.

    Example:
        >>> directory_of("checkpoints").latest() is None
        True
    """
    text = os.fspath(where)
    return RemoteDirectory(text) if is_address(text) else FolderDirectory(Path(text))
