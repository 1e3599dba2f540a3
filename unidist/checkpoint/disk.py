"""Files as a checkpoint needs them: on the disk before they count, no links, errors with names."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from unidist.errors import CheckpointError


def error_of(file: str | Path, error: OSError, tensor: str = "") -> CheckpointError:
    of = f" (tensor {tensor!r})" if tensor else ""
    return CheckpointError(f"{file}: {error.strerror or error}{of}", file=str(file), tensor=tensor)


@contextlib.contextmanager
def told(file: str | Path, tensor: str = "") -> Iterator[None]:
    """Turns what the system says of a file into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise error_of(file, error, tensor) from error


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
    parts = []
    while size:
        with told(name):
            part = os.pread(opened, size, offset)
        if not part:
            raise cut_short(name, offset)
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


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


def write_durably(folder: Path, name: str, content: bytes) -> None:
    """A file that is either there, whole and on the disk, or not there."""
    write_whole(folder, name, content, is_kept=True)
    sync_folder(folder)


def write_whole(folder: Path, name: str, content: bytes, *, is_kept: bool = False) -> None:
    """A file that other processes see whole, or not at all.

    Args:
        is_kept: what it has is on the disk first, for the time after a crash.
    """
    path, half = folder / name, folder / f"{name}.half"
    with told(path):
        with half.open("wb") as file:
            file.write(content)
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
