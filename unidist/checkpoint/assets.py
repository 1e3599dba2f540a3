"""Files that belong to a layer, as tensors of bytes.

They are named by the layer and by their place in its folder.

A name is the layer's, "//assets/" and the file's path: no layer has an empty part in its name. "//own/" comes before
what is an array and no file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from unidist.checkpoint import disk
from unidist.checkpoint.checksums import Bytes
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError

KIND = "asset"
# Of all that the layers of one step keep: it is held whole.
LARGEST = 1 << 28
_FILES, _ARRAYS = "//assets/", "//own/"
# A path's parts, and its bytes: what every file system takes.
_MOST_PARTS, _MOST_BYTES = 16, 200


def file_name(layer: str, path: str) -> str:
    """Returns the name of a file's tensor.

    Example:
        >>> split(file_name("text", "vocabulary.txt"))
        ('text', True, 'vocabulary.txt')
    """
    return f"{layer}{_FILES}{path}"


def array_name(layer: str, key: str) -> str:
    """Returns the name of an array that a layer keeps beside its variables."""
    return f"{layer}{_ARRAYS}{key}"


def split(name: str) -> tuple[str, bool, str]:
    """(layer, whether it is a file, its path or key) of a tensor's name.

    Raises:
        CheckpointError: it is no such name, or the path leads out of the layer's folder.
    """
    layer, _, rest = name.partition("//")
    if layer and rest.startswith(_FILES[2:]):
        return layer, True, _checked(rest[len(_FILES) - 2 :], name)
    if layer and rest.startswith(_ARRAYS[2:]):
        return layer, False, rest[len(_ARRAYS) - 2 :]
    raise CheckpointError(f"tensor {name!r:.200} belongs to no layer", tensor=name)


def _checked(path: str, name: str) -> str:
    parts = path.split("/")
    is_plain = all(part not in ("", ".", "..") and len(part.encode()) <= _MOST_BYTES for part in parts)
    if not is_plain or len(parts) > _MOST_PARTS or "\\" in path or "\0" in path:
        text = "names no file within a layer's folder: parts may not be empty, . or .., nor have a backslash"
        raise CheckpointError(f"tensor {name!r:.200} {text}", tensor=name)
    return path


def check_sizes(tensors: Iterable[Tensor]) -> None:
    """Raises CheckpointError: the files and arrays of all layers have more bytes together than are held."""
    total = sum(tensor.nbytes for tensor in tensors)
    if total > LARGEST:
        raise CheckpointError(
            f"layers' files and arrays have {total} bytes, {LARGEST} is the most: keep large arrays as variables"
        )


def files_in(folder: Path) -> dict[str, Bytes]:
    """The files of a folder and of those in it, by their paths.

    Raises:
        CheckpointError: one is a link, a pipe or the like; or they have too many bytes.
    """
    found: dict[str, Bytes] = {}
    left = LARGEST
    with disk.told(folder):
        for here, folders, names in os.walk(folder):
            for name in sorted([*folders, *names]):
                path = Path(here, name)
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    continue
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"{path}: a layer wrote a link or the like, which no checkpoint holds")
                left -= status.st_size
                if left < 0:
                    raise CheckpointError(f"{path}: a layer's files have more than {LARGEST} bytes")
                found[path.relative_to(folder).as_posix()] = np.fromfile(path, np.uint8)
    return found


def temporary() -> AbstractContextManager[str]:
    """A folder that nobody else has, and that is removed."""
    return tempfile.TemporaryDirectory(prefix="unidist-assets-", ignore_cleanup_errors=True)


def lay_out(folder: Path, files: Mapping[str, Bytes]) -> None:
    """Writes files into an empty folder. Their paths are of `split`.

    Raises:
        CheckpointError: one is another's folder, or the system cannot write.
    """
    for path, content in files.items():
        where = folder / path
        with disk.told(where):
            where.parent.mkdir(parents=True, exist_ok=True)
            with where.open("xb") as file:
                file.write(content.data)
