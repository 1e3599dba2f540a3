"""Memory of a node that outlives its processes: nameless files, which the launcher keeps open.

The launcher names them to its processes by its own number and theirs. They go with the launcher, whatever ends it, and
no limit of a file system holds for them.

Source of the method: memfd_create(2). Processes of the same user may open such a file again, at /proc/PID/fd.
"""

from __future__ import annotations

import os
import secrets

from unidist.backends.environment import EACH, MEMORY


class Memory:
    """The memory that the launcher keeps open.

    Args:
        processes: of this node; 0: no memory is kept.

    Attributes:
        variables: for the processes' environment; none where the system has no such files.
    """

    def __init__(self, processes: int) -> None:
        self._files: list[int] = []
        self.variables: dict[str, str] = {}
        if processes and hasattr(os, "memfd_create"):
            self._files = [os.memfd_create("unidist-steps", os.MFD_CLOEXEC) for _ in range(EACH * processes)]
            words = [secrets.randbits(31), os.getpid(), *self._files]
            self.variables = {MEMORY: " ".join(map(str, words))}

    def close(self) -> None:
        """Gives the memory back."""
        while self._files:
            os.close(self._files.pop())
