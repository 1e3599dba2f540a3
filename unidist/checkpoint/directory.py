"""A directory of checkpoints: which steps count, what is written and committed there, which steps go.

Folders (folders.py) and object stores (remote.py) differ in how bytes come to them, and in what makes a step count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from unidist.checkpoint.checksums import crc
from unidist.checkpoint.manifest import CHECKSUMS, INDEX, Manifest, Told, text_of
from unidist.checkpoint.opened import Opened
from unidist.checkpoint.tensors import FileSpec
from unidist.checkpoint.writing import Part, PartWriter, joined, part_of
from unidist.errors import CheckpointError

LAST_STEP = 10**12 - 1
Step = int | Literal["latest"]


def name_of(step: int) -> str:
    """Returns what the names of a step's folder and files begin with.

    Raises:
        CheckpointError: it is no step's number.
    """
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise CheckpointError(f"a step is a number from 0 to {LAST_STEP}, got {step!r}")
    return f"step-{step:08d}"


class Directory(ABC):
    """A directory of checkpoints, which all processes see.

    Args:
        where: its path, or its address.
    """

    # Whether files hold parts of tensors, one file a process.
    is_in_parts = False

    def __init__(self, where: str) -> None:
        self.where = where

    # looking ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def steps(self) -> list[int]:
        """The steps that count, in order; none where there is no directory."""

    @abstractmethod
    def find(self, step: Step) -> Path | str:
        """A step's folder, or the address of its manifest. Raises CheckpointError: there is no such step."""

    @abstractmethod
    def opened(self, step: Step) -> tuple[Path | str, Opened]:
        """(where a step's files are, the files). Raises CheckpointError: there is no such step."""

    def latest(self) -> int | None:
        """The last step that counts."""
        return max(self.steps(), default=None)

    def number(self, step: Step) -> int:
        """The number of a step that counts.

        Raises:
            CheckpointError: there is none.
        """
        there = self.steps()
        if step == "latest" and there:
            return there[-1]
        if step != "latest" and step in there:
            return step
        known = ", ".join(map(str, there[-5:])) or "none"
        of = "" if step == "latest" else f" of step {step}; the last ones: {known}"
        raise CheckpointError(f"{self.where} has no checkpoint{of}", file=self.where)

    # writing ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, step: int, files: Sequence[FileSpec]) -> str:
        """Prepares what all write into, and returns its name. Process 0's; others begin when this is done."""

    @abstractmethod
    def writer(self, name: str, files: Sequence[FileSpec], place: int) -> PartWriter:
        """The writer of one process's part. `files`: of `files_of`, as in all other processes."""

    def commit(self, name: str, files: Sequence[FileSpec], facts: Mapping[str, Any], places: int) -> str:
        """Makes a step count, when every process has finished its part. Process 0's.

        Args:
            name: of `prepare`.
            files: of `files_of`.
            facts: JSON of the caller's own, kept in the manifest.
            places: how many processes wrote.

        Returns:
            The step's folder, or the address of its manifest.

        Raises:
            CheckpointError: a part is missing, damaged or of another try; bytes of a tensor were not written, or twice;
                what is there cannot be written to.
        """
        step, writing = begun = self._begun(name, files)
        parts = [Part.parsed(self._read(name, part_of(place)), place, writing) for place in range(places)]
        told, index = self._described(name, begun, files, parts)
        tensors = tuple(tensor for file in files for tensor in file.tensors.values())
        spec, pieces = joined(name, tensors, parts)
        checksums = self._put(name, CHECKSUMS, pieces, len(spec.header))
        of_index = self._put(name, INDEX, [index], len(index))
        in_parts = (tensors, name) if self.is_in_parts else ()
        text = text_of(Manifest(step, writing, told, checksums, of_index, facts, *in_parts))
        return self._stand(name, step, text, [part_of(place) for place in range(places)])

    def _put(self, name: str, file: str, content: Iterable[bytes], header: int) -> Told:
        number = size = 0

        def counted() -> Iterator[bytes]:
            nonlocal number, size
            for piece in content:
                number, size = crc(piece, number), size + len(piece)
                yield piece

        self._write(name, file, counted())
        return Told(file, size, header, number)

    @abstractmethod
    def _begun(self, name: str, files: Sequence[FileSpec]) -> tuple[int, str]:
        """(step, number of the writing) of what was prepared."""

    @abstractmethod
    def _read(self, name: str, part: str) -> bytes:
        """A part's description. Raises CheckpointError: there is none."""

    @abstractmethod
    def _described(
        self, name: str, begun: tuple[int, str], files: Sequence[FileSpec], parts: Sequence[Part]
    ) -> tuple[tuple[Told, ...], bytes]:
        """(the files of tensors, as the manifest describes them; the content of the index)."""

    @abstractmethod
    def _write(self, name: str, file: str, content: Iterable[bytes]) -> None:
        """Writes a file, which is whole and kept then."""

    @abstractmethod
    def _stand(self, name: str, step: int, manifest: bytes, parts: Sequence[str]) -> str:
        """Lets the step count, by its manifest. The descriptions of parts go."""

    # removing ---------------------------------------------------------------------------------------------------------

    def prune(self, keep: int, newest: int) -> list[int]:
        """Removes steps before `newest` so that `keep` are left with it; and what crashes left.

        Args:
            keep: how many, at least 1.
            newest: the step that was written now. Later ones, of a training that went on from an earlier step, stay.

        Returns:
            The steps that were removed.

        Raises:
            CheckpointError: none would be left.
        """
        if keep < 1:
            raise CheckpointError(f"keep must be 1 or more, got {keep}")
        older = [step for step in self.steps() if step < newest]
        old = older[: max(0, len(older) - (keep - 1))]
        for step in old:
            self._remove(step)
        self._clear(newest)
        return old

    @abstractmethod
    def _remove(self, step: int) -> None:
        """Removes a step. It does not count from the first moment on."""

    @abstractmethod
    def _clear(self, newest: int) -> None:
        """Removes what does not count of steps before `newest`."""
