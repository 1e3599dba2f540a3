"""Early: what was written into a file comes to the disk while more is written, and not all at the end."""

from __future__ import annotations

import contextlib
import os

# Large enough for a disk to be busy with, small enough to begin early.
_EACH = 8 << 20


class Early:
    """Asks the system to begin with each 8 MiB that were written in one run, of one open file.

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
