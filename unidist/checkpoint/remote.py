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

import base64
import json
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from unidist.checkpoint import folders, manifest
from unidist.checkpoint.checksums import Running, crc
from unidist.checkpoint.folders import Step
from unidist.checkpoint.joining import Part, joined
from unidist.checkpoint.manifest import CHECKSUMS, INDEX, Manifest, Told
from unidist.checkpoint.opened import Opened
from unidist.checkpoint.places import piece_of
from unidist.checkpoint.stores import Store, StoreFiles
from unidist.checkpoint.tensors import LARGEST_TEXT, FileSpec, Tensor, file_of, parse_json, stamped
from unidist.checkpoint.writing import as_bytes
from unidist.errors import CheckpointError

_MANIFEST = re.compile(r"step-(\d{8,12})\.json")
_FOLDER = re.compile(r"step-(\d{8,12})-[0-9a-f]{32}")
_PIECE = 16 << 20


def steps(address: str) -> list[int]:
    """The steps that count, in order."""
    return _steps(Store(address))


def _steps(store: Store) -> list[int]:
    return sorted(int(found[1]) for name in store.names() if (found := _MANIFEST.fullmatch(name)))


def address_of(address: str, step: Step) -> str:
    """Returns where the manifest of a step is.

    Raises:
        CheckpointError: there is no such step.
    """
    store = Store(address)
    return f"{store.address}/{_manifest_of(_number(store, step))}"


def _number(store: Store, step: Step) -> int:
    there = _steps(store)
    if step != "latest" and step not in there:
        raise folders.missing(store.address, step, there)
    if not there:
        raise CheckpointError(f"{store.address} has no checkpoint", file=store.address)
    return there[-1] if step == "latest" else step


def opened(address: str, step: Step) -> tuple[str, Opened]:
    """(where a step's files are, the files).

    Raises:
        CheckpointError: there is no such step.
    """
    store = Store(address)
    number = _number(store, step)
    name = _manifest_of(number)
    if (size := store.size(name)) > LARGEST_TEXT:
        raise CheckpointError(f"{name}: has {size} bytes; {LARGEST_TEXT} is the most", file=name)
    text = store.read(name)
    told = manifest.parsed(text)
    if told.step != number or _FOLDER.fullmatch(told.folder) is None:
        raise CheckpointError(f"{name}: is the manifest of step {told.step}, with its files in {told.folder!r:.100}")
    return f"{store.address}/{told.folder}", Opened(StoreFiles(store, told.folder), text)


class RemoteDirectory:
    """A directory of checkpoints in a store, as processes write it together (keras/checkpoint/api.py)."""

    def __init__(self, address: str) -> None:
        self._store = Store(address)

    def latest(self) -> int | None:
        return max(_steps(self._store), default=None)

    def prepare(self, step: int, files: Sequence[FileSpec]) -> str:
        """The name under which all write: nothing is made."""
        folders.folder_of(Path(), step)
        return f"step-{step:08d}-{secrets.token_hex(16)}"

    def writer(self, name: str, files: Sequence[FileSpec], place: int) -> RemoteWriter:
        return RemoteWriter(self._store, name, files, place)

    def commit(self, name: str, files: Sequence[FileSpec], facts: Mapping[str, Any], places: int) -> str:
        """Makes a step count, when every process has finished its part. Process 0's.

        Returns:
            The address of its manifest.

        Raises:
            CheckpointError: a part is missing; bytes of a tensor were not written, or twice; the store cannot write.
        """
        step, writing = int(name.split("-")[1]), name.split("-")[2]
        tensors = tuple(tensor for file in files for tensor in file.tensors.values())
        parts, told = [], []
        for place in range(places):
            found = parse_json(self._store.read(f"{name}/{_told_of(place)}"), _told_of(place))
            content = np.frombuffer(base64.b64decode(found["ranges"]), np.uint8)  # type: ignore[index]
            parts.append(Part.read(place, found, content))  # type: ignore[arg-type]
            told.append(Told(**found["file"]))  # type: ignore[index]
        checksums = self._write_checksums(name, tensors, parts)
        index = _index(tensors, parts)
        self._store.write(f"{name}/{INDEX}", index)
        text = manifest.text_of(
            Manifest(
                step,
                writing,
                tuple(told),
                checksums,
                Told(INDEX, len(index), len(index), crc(index)),
                facts,
                tensors=tensors,
                folder=name,
            )
        )
        self._store.write(_manifest_of(step), text)
        for place in range(places):
            self._store.remove(f"{name}/{_told_of(place)}")
        self._forget(step, name)
        return f"{self._store.address}/{_manifest_of(step)}"

    def _write_checksums(self, name: str, tensors: Sequence[Tensor], parts: Sequence[Part]) -> Told:
        spec, pieces = joined([(CHECKSUMS, tensor) for tensor in tensors], parts)
        number = crc(spec.header)
        with self._store.writing(f"{name}/{CHECKSUMS}") as file:
            file.write(spec.header)
            for piece in pieces:
                file.write(piece)
                number = crc(piece, number)
        return Told(CHECKSUMS, spec.size, len(spec.header), number)

    def _forget(self, step: int, kept: str) -> None:
        """Removes what other writings of a step have left."""
        for found in self._store.names():
            if found.startswith(f"step-{step:08d}-") and found != kept:
                self._store.remove(found)

    def prune(self, keep: int, newest: int) -> list[int]:
        """As folders.prune."""
        there = _steps(self._store)
        old = folders.outdated(there, keep, newest)
        for step in old:
            self._store.remove(_manifest_of(step))
        stay = {*there} - {*old}
        for name in self._store.names():
            found = _FOLDER.fullmatch(name)
            if found and int(found[1]) < newest and int(found[1]) not in stay:
                self._store.remove(name)
        return old


class RemoteWriter:
    """The part of a step that one process writes (writing.PartWriter's likeness).

    It is gathered in a file on this machine: a store takes an object from its first byte to its last, and that one
    describes all others.
    """

    def __init__(self, store: Store, folder: str, files: Sequence[FileSpec], place: int) -> None:
        self._store, self._folder, self._place = store, folder, place
        self._tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        self._gathered: IO[bytes] = tempfile.TemporaryFile(prefix="unidist-part-")  # noqa: SIM115 (__exit__ closes it)
        self._pieces: list[tuple[Tensor, int]] = []
        self._ranges: dict[str, list[Running]] = {}

    def write(self, name: str, begin: int, data: Any) -> None:
        """As PartWriter.write; one call for each range."""
        content = as_bytes(data)
        if not len(content):
            return
        tensor = self._tensors[name]
        nbytes = len(content)
        running = Running(begin)
        running.add(content)
        self._ranges.setdefault(name, []).append(running)
        count, rest = divmod(nbytes, tensor.itemsize)
        dtype, count = ("uint8", nbytes) if rest else (tensor.dtype, count)
        self._pieces.append((Tensor(piece_of(name, begin), dtype, (count,), tensor.kind), self._gathered.tell()))
        try:
            self._gathered.write(content.data)
        except OSError as error:
            raise CheckpointError(
                f"{tempfile.gettempdir()}: {error.strerror} (tensor {name!r})", tensor=name
            ) from error

    def finish(self) -> None:
        """The part, and then its description.

        Raises:
            CheckpointError: the store cannot write them.
        """
        name = f"part-{self._place:05d}.safetensors"
        spec = file_of(name, [piece for piece, _ in self._pieces])
        header = stamped(spec.header, int(self._folder.split("-")[1]), self._folder.split("-")[2])
        where = {piece.name: at for piece, at in self._pieces}
        with self._store.writing(f"{self._folder}/{name}") as file:
            file.write(header)
            for piece, tensor in spec.tensors.items():
                self._gathered.seek(where[piece])
                left = tensor.nbytes
                while left:
                    data = self._gathered.read(min(_PIECE, left))
                    file.write(data)
                    left -= len(data)
        part = Part.of(self._ranges)
        told = {
            "file": {"name": name, "size": spec.size, "length": len(header), "crc32c": crc(header)},
            "ranges": base64.b64encode(part.content).decode(),
            **part.told,
        }
        self._store.write(f"{self._folder}/{_told_of(self._place)}", json.dumps(told).encode())

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._gathered.close()


def _manifest_of(step: int) -> str:
    return f"step-{step:08d}.json"


def _told_of(place: int) -> str:
    return f"part-{place:05d}.json"


def _index(tensors: Sequence[Tensor], parts: Sequence[Part]) -> bytes:
    """Returns which parts have which of the model's tensors."""
    of: dict[str, list[str]] = {tensor.name: [] for tensor in tensors if tensor.kind == "model"}
    for part in parts:
        for name, _ in part.names:
            if name in of:
                of[name].append(f"part-{part.place:05d}.safetensors")
    return json.dumps({"parts": of}, indent=2).encode() + b"\n"
