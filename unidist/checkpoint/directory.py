"""A directory of checkpoints, as processes write it together: folders of files, or an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unidist.checkpoint import folders
from unidist.checkpoint.remote import RemoteDirectory
from unidist.checkpoint.stores import is_address
from unidist.checkpoint.tensors import FileSpec
from unidist.checkpoint.writing import PartWriter, commit, prepare


class FolderDirectory:
    """A folder, which all processes see.

    Its methods are those of writing.py and folders.py, with names for paths.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def latest(self) -> int | None:
        return folders.latest(self.path)

    def prepare(self, step: int, files: Sequence[FileSpec]) -> str:
        return prepare(self.path, step, files).name

    def writer(self, name: str, files: Sequence[FileSpec], place: int) -> PartWriter:
        return PartWriter(self.path / name, files, place)

    def commit(self, name: str, files: Sequence[FileSpec], facts: Mapping[str, Any], places: int) -> str:
        return str(commit(self.path / name, files, facts, places))

    def prune(self, keep: int, newest: int) -> list[int]:
        return folders.prune(self.path, keep, newest)


Directory = FolderDirectory | RemoteDirectory


def directory_of(where: str | os.PathLike[str]) -> Directory:
    """Raises CheckpointError: an address of a store that cannot be used here.

    Example:
        >>> directory_of("checkpoints").latest() is None
        True
    """
    text = os.fspath(where)
    return RemoteDirectory(text) if is_address(text) else FolderDirectory(Path(text))
