"""Knows addresses of object stores from paths of folders."""

from __future__ import annotations

import os
from pathlib import Path

from unidist.checkpoint.directory import Directory
from unidist.checkpoint.folders import FolderDirectory
from unidist.checkpoint.remote import RemoteDirectory
from unidist.checkpoint.stores import is_address


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
