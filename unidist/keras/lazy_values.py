"""Reads a process's own ranges of values in files: a model loads in the memory of its shards.

Inside a scope Keras's loaders, and keras_hub's of Hugging Face's files, are given `Stored` values in place of arrays. A
placed variable reads its shards of one; to all others it is the array, read whole when it is first looked at.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from unidist.backends.protocol import Array
from unidist.keras.patching.compat import saving_lib
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.strategies.distribution import current

# Items; what is smaller is read whole at once.
SMALL = 1 << 14

Slices = tuple[slice, ...]


class Stored(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is in a file.

    Args:
        read: gives the part at one slice for each dim, with steps of one.

    Example:
        >>> there = np.arange(6.0).reshape(2, 3)
        >>> stored = Stored(there.shape, there.dtype, lambda index: there[index])
        >>> stored.transpose().part((slice(0, 1), slice(0, 2)))
        array([[0., 3.]])
        >>> stored + 1
        array([[1., 2., 3.],
               [4., 5., 6.]])
    """

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[Slices], Array]) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._read = read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def part(self, index: Slices) -> Array:
        """Returns what is at one slice for each dim."""
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        return self._read(tuple(slice(low, high) for low, high in bounds))

    def transpose(self, *axes: Any) -> Stored:
        given = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = [axis % self.ndim for axis in given] if given else list(reversed(range(self.ndim)))

        def read(index: Slices) -> Array:
            return self._read(tuple(index[order.index(dim)] for dim in range(self.ndim))).transpose(order)

        return Stored([self.shape[axis] for axis in order], self.dtype, read)

    @property
    def T(self) -> Stored:  # noqa: N802 (NumPy's name)
        return self.transpose()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = self.part((slice(None),) * self.ndim)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(x) if isinstance(x, Stored) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def hooks() -> Iterator[Hook]:
    """Keras's reading of HDF5 files and .keras archives, and keras_hub's of safetensors files."""
    why = "a process reads its ranges of a file"
    yield Hook(saving_lib.H5IOStore, "__getitem__", _from_hdf5, why)
    yield Hook(saving_lib.H5IOStore, "_get_h5_file", _within_archive, why)
    yield Hook(saving_lib, "_load_model_from_fileobj", _loading_archive, why)
    yield Hook(saving_lib, "is_memory_sufficient", _never_whole, why)
    yield Hook(safetensors, "safe_open", _from_safetensors, why)


# HDF5 -----------------------------------------------------------------------------------------------------------------


@calling
def _from_hdf5(original: Any, store: Any, key: str) -> Any:
    if current() is None or store.mode != "r":
        return original(store, key)
    dataset = saving_lib.safe_get_h5_dataset(store._h5_entry_group, key)
    return original(store, key) if dataset.size < SMALL else _of_dataset(dataset)


def _of_dataset(dataset: Any) -> Stored:
    dtype = dataset.dtype
    if dataset.attrs.get("dtype") == "bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    filename, name = dataset.file.filename, dataset.name

    def read(index: Slices) -> Array:
        found = np.empty([part.stop - part.start for part in index], dtype)
        # Keras closes a file of several as soon as it goes on to another.
        with contextlib.nullcontext() if dataset else _opened(filename) as file:
            if found.size:
                (file[name] if file is not None else dataset).read_direct(found, index)
        return found

    return Stored(dataset.shape, dtype, read)


def _opened(filename: Any) -> Any:
    return saving_lib.h5py.File(filename, "r")


# .keras archives ------------------------------------------------------------------------------------------------------


class _Loading(threading.local):
    archive = False


_now = _Loading()


@calling
def _loading_archive(original: Any, *args: Any, **kwargs: Any) -> Any:
    before, _now.archive = _now.archive, current() is not None
    try:
        return original(*args, **kwargs)
    finally:
        _now.archive = before


@calling
def _never_whole(original: Any, model: Any) -> Any:
    """Replaces is_memory_sufficient, so that Keras reads an archive as it is.

    Else it reads its weights into memory where they fit, or into a file beside it, each process its own. On an error of
    either it reads the archive as it is.
    """
    if _now.archive:
        raise MemoryError("each process reads its ranges of the archive")
    return original(model)


@calling
def _within_archive(original: Any, store: Any, path_or_io: Any, mode: str | None = None) -> Any:
    found = None
    if current() is not None and store.archive and (mode or store.mode) == "r":
        found = _member(store.archive, str(path_or_io))
    if found is None:
        return original(store, path_or_io, mode)
    store.io_file = found
    return saving_lib.h5py.File(found, "r")


def _member(archive: zipfile.ZipFile, name: str) -> _Window | None:
    info, path = archive.getinfo(name), archive.filename
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    # The local header's own lengths: its extra field may differ from the directory's (APPNOTE 4.3.7).
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return _Window(Path(path), info.header_offset + 30 + name_length + extra_length, info.file_size)


class _Window(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = path.open("rb", buffering=0), start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._start + self._at)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


# safetensors ----------------------------------------------------------------------------------------------------------


@calling
def _from_safetensors(original: Any, filename: Any, framework: str, *args: Any, **kwargs: Any) -> Any:
    caller = str(sys._getframe(2).f_globals.get("__name__"))  # behind the replacement
    if current() is None or framework not in ("np", "numpy") or not caller.startswith("keras_hub."):
        return original(filename, framework, *args, **kwargs)
    return _Tensors(lambda: original(filename, framework, *args, **kwargs))


class _Tensors:
    """A safetensors file that is open while it is read only.

    What was read of a mapped file counts as memory of the process until it is closed.
    """

    def __init__(self, open_it: Callable[[], Any]) -> None:
        self._open = open_it
        with open_it() as file:
            self._names = list(file.keys())

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        return self._names

    def get_tensor(self, name: str) -> Any:
        with self._open() as file:
            found = file.get_slice(name)
            shape = found.get_shape()
            if prod(shape) < SMALL:
                return file.get_tensor(name)
            # The package names a dtype by its own code: NumPy's is that of a part.
            dtype = found[tuple(slice(0, 1) for _ in shape)].dtype

        def read(index: Slices) -> Array:
            with self._open() as file:
                part: Array = file.get_slice(name)[index]
                return part

        return Stored(shape, dtype, read)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._open() as file:
                return getattr(file, name)(*args, **kwargs)

        return call
