"""Memory of a node that outlives its processes: files without a name, which the launcher keeps open for them.

The launcher names them to its processes by its own number and theirs. They go with the launcher, whatever ends it, and
no limit of a file system holds for them.

Source of the method: memfd_create(2). Processes of the same user may open such a file again, at /proc/PID/fd.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

# "NODE PID DESCRIPTOR DESCRIPTOR...": two for each process of the node, in the order of their numbers on it.
VARIABLE = "UNIDIST_MEMORY"
# A step that stands, and the one that takes its place.
EACH = 2


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory files of a node, as a process of it sees them.

    Attributes:
        node: a number drawn by chance, by which processes of one node know each other.
        paths: of all files.

    Example:
        >>> NodeMemory.read({"UNIDIST_MEMORY": "7 4321 5 6"})
        NodeMemory(node=7, paths=('/proc/4321/fd/5', '/proc/4321/fd/6'))
        >>> NodeMemory.read({}) is None
        True
    """

    node: int
    paths: tuple[str, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> NodeMemory | None:
        """What the launcher has said. None: there is none, or it keeps no memory."""
        said = (os.environ if environ is None else environ).get(VARIABLE)
        if not said:
            return None
        node, pid, *descriptors = said.split()
        return cls(int(node), tuple(f"/proc/{pid}/fd/{one}" for one in descriptors))

    def of(self, local_index: int) -> tuple[str, ...]:
        """Those of one process of the node."""
        return self.paths[EACH * local_index : EACH * (local_index + 1)]


class Memory:
    """What the launcher keeps open.

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
            self.variables = {VARIABLE: " ".join(map(str, words))}

    def close(self) -> None:
        """Gives the memory back."""
        while self._files:
            os.close(self._files.pop())
