"""Object stores, by fsspec: "s3://bucket/run", "gs://...", and all else that it knows.

An object is there whole, or not at all, and cannot be changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import numpy as np

from unidist.backends import installed
from unidist.checkpoint.checksums import Bytes
from unidist.checkpoint.disk import cut_short
from unidist.errors import CheckpointError

# Bytes that are asked for at once, and how many such windows are held: a request takes some 30 ms.
_WINDOW, _MOST_WINDOWS = 4 << 20, 4


def is_address(directory: object) -> bool:
    """Returns whether it is an address, and no folder."""
    return "://" in str(directory)


class Store:
    """A directory of an object store.

    Args:
        address: as "s3://bucket/run".

    Raises:
        CheckpointError: fsspec is not installed, or not what it needs for such addresses.

    Example:
        >>> store = Store("memory://example-of-a-store")
        >>> store.write("note", [b"some ", b"bytes"])
        >>> store.names(), store.read("note")
        (['note'], b'some bytes')
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            import fsspec
        except ImportError as error:
            raise CheckpointError(
                f"{address!r} is in an object store, and fsspec is not installed: {installed.install('remote')}"
            ) from error
        with self._told(address):
            self._system, self._root = fsspec.core.url_to_fs(self.address)
        # What another process has written is to be seen.
        self._system.use_listings_cache = False

    def __repr__(self) -> str:
        return f"Store({self.address!r})"

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointError(f"{name}: is missing in {self.address}", file=name) from error
        except Exception as error:
            raise CheckpointError(f"{name} in {self.address}: {type(error).__name__}: {error}", file=name) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def names(self, folder: str = "") -> list[str]:
        """Returns the names that are there; none where there is no such folder."""
        with self._told(folder or self.address):
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def size(self, name: str) -> int:
        with self._told(name):
            return int(self._system.info(self._path(name))["size"])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._told(name):
            return bytes(self._system.cat_file(self._path(name), start=begin, end=end))

    def write(self, name: str, content: Iterable[bytes]) -> None:
        """An object, piece by piece, in place of one that is there."""
        with self._told(name):
            path = self._path(name)
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._system.open(path, "wb") as file:
                for piece in content:
                    file.write(piece)

    def remove(self, name: str) -> None:
        """An object, or all of a folder; what is not there is left."""
        with self._told(name), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._path(name), recursive=True)


class StoreFiles:
    """The files of one step in a store (opened.Files).

    What is read is asked for in windows; some are held.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._size = functools.cache(lambda name: store.size(f"{folder}/{name}"))
        self._window = functools.lru_cache(_MOST_WINDOWS)(self._read)

    def size(self, name: str) -> int:
        return self._size(name)

    def read(self, name: str, offset: int, out: Bytes, tensor: str = "") -> None:
        end = offset + len(out)
        if end > self.size(name):
            raise cut_short(name, self.size(name), tensor)
        for begin in range(offset // _WINDOW * _WINDOW, end, _WINDOW):
            window = self._window(name, begin)
            lo, hi = max(offset, begin), min(end, begin + _WINDOW)
            if hi - begin > len(window):
                raise cut_short(name, begin + len(window), tensor)
            out[lo - offset : hi - offset] = window[lo - begin : hi - begin]

    def _read(self, name: str, begin: int) -> Bytes:
        end = min(begin + _WINDOW, self.size(name))
        return np.frombuffer(self._store.read(f"{self._folder}/{name}", begin, end), np.uint8)

    def close(self) -> None:
        self._window.cache_clear()
