"""Files as a checkpoint needs them: on the disk before they count, no links, errors with names."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from unidist.checkpoint.checksums import Bytes
from unidist.errors import CheckpointError

# Written in one run: large enough for a disk to be busy with, small enough to begin early.
_EACH = 8 << 20


@contextlib.contextmanager
def told(file: str | Path, tensor: str = "") -> Iterator[None]:
    """Turns what the system says of a file into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        of = f" (tensor {tensor!r})" if tensor else ""
        raise CheckpointError(f"{file}: {error.strerror or error}{of}", file=str(file), tensor=tensor) from error


def open_regular(name: str, folder: int, flags: int = os.O_RDONLY) -> int:
    """Opens a file of a folder that is open: no link, no pipe, no device.

    Raises:
        CheckpointError: there is no such file, or it is something else.
    """
    try:
        # Without O_NONBLOCK opening a pipe would wait for who writes into it.
        opened = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: is missing", file=name) from error
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be opened: {error.strerror}", file=name) from error
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise CheckpointError(f"{name}: is no regular file", file=name)
    return opened


def open_folder(folder: Path) -> int:
    with told(folder):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[int]:
    """A folder, which is open meanwhile."""
    opened = open_folder(folder)
    try:
        yield opened
    finally:
        os.close(opened)


def read_small(name: str, folder: int, most: int) -> bytes:
    """All of a file, if it has at most so many bytes."""
    opened = open_regular(name, folder)
    try:
        size = os.fstat(opened).st_size
        if size > most:
            raise CheckpointError(f"{name}: has {size} bytes; {most} is the most", file=name)
        return read_exactly(opened, size, 0, name)
    finally:
        os.close(opened)


def read_exactly(opened: int, size: int, offset: int, name: str) -> bytes:
    # Memory is taken for what is there.
    if offset + size > (there := os.fstat(opened).st_size):
        raise cut_short(name, there)
    out = bytearray(size)
    read_into(opened, memoryview(out), offset, name)
    return bytes(out)


def read_into(opened: int, out: memoryview, offset: int, name: str | Path, tensor: str = "") -> None:
    """Fills memory with what a file has from a byte on.

    Raises:
        CheckpointError: it ends before, or the system cannot read it.
    """
    while len(out):
        with told(name, tensor):
            got = os.preadv(opened, [out], offset)
        if not got:
            raise cut_short(name, offset, tensor)
        out, offset = out[got:], offset + got


def cut_short(name: str | Path, offset: int, tensor: str = "") -> CheckpointError:
    of = f", in tensor {tensor!r}" if tensor else ""
    return CheckpointError(f"{name}: is cut short: it ends at byte {offset}{of}", file=str(name), tensor=tensor)


def write_all(opened: int, data: Bytes, offset: int) -> None:
    """Writes all bytes, however many the system takes at once."""
    left = data.data
    while len(left):
        written = os.pwrite(opened, left, offset)
        left, offset = left[written:], offset + written


def write_durably(folder: Path, name: str, content: bytes) -> None:
    """A file that is either there, whole and on the disk, or not there."""
    write_whole(folder, name, [content], is_kept=True)
    sync_folder(folder)


def write_whole(folder: Path, name: str, content: Iterable[bytes | memoryview], *, is_kept: bool = False) -> None:
    """A file that other processes see whole, or not at all.

    Args:
        content: piece by piece.
        is_kept: what it has is on the disk first, for the time after a crash.
    """
    path, half = folder / name, folder / f"{name}.half"
    with told(path):
        with half.open("wb") as file:
            file.writelines(content)
            file.flush()
            if is_kept:
                os.fsync(file.fileno())
        half.rename(path)


def sync_folder(folder: Path) -> None:
    """Brings what was made, renamed and removed in a folder to the disk."""
    with told(folder):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


class Early:
    """Asks the system to begin with each 8 MiB that were written in one run, of one open file.

    So they come to the disk while more is written, and not all at the end.

    Source of the method: Linux begins to write dirty pages of a range that POSIX_FADV_DONTNEED names, does not wait for
    them, and keeps them in memory. `fsync` then finds little left. Elsewhere it is a hint that nobody need take.

    Args:
        descriptor: the file's.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._begin = self._end = 0

    def wrote(self, begin: int, end: int) -> None:
        """The bytes [begin, end) were written."""
        if begin != self._end:
            self._ask()
            self._begin = begin
        self._end = end
        if self._end - self._begin >= _EACH:
            self._ask()

    def _ask(self) -> None:
        if self._end > self._begin and hasattr(os, "posix_fadvise"):
            # A file system that knows no such hint writes when it likes: what is wrong with a write, fsync says.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, self._begin, self._end - self._begin, os.POSIX_FADV_DONTNEED)
        self._begin = self._end
