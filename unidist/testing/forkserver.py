"""The fork servers that worlds of processes are forked from: kept for all tests of a process.

Processes of one server order their sets of strings alike. So a world takes them from two servers in turn (`TWINS`), and
ranks whose order of a set matters are found out.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from unidist.launch.forkserver import ForkServer

# Servers that differ in the seed of Python's string hashes alone.
TWINS = 2
# Of those that nothing runs of: each holds some hundred megabytes. The least recently used one is ended first.
KEPT = 6
# What the processes run.
WORKER = "unidist.testing.worker"

_servers: dict[tuple[Any, ...], ForkServer] = {}
_servers_lock = threading.Lock()


def server(env: Mapping[str, str], modules: Sequence[str], twin: int = 0) -> ForkServer:
    """Returns the server with this environment and modules: started once and kept until `close_all`.

    Args:
        twin: 0 to TWINS - 1; servers that differ in it order sets of strings differently.

    Raises:
        RuntimeError: it cannot import, or forking is not safe after that.
    """
    key = (frozenset(env.items()), tuple(modules), twin)
    with _servers_lock:
        found = _servers.pop(key, None) or _started({**env, "PYTHONHASHSEED": str(1 + twin)}, modules)
        _servers[key] = found
        idle = [other for other, one in _servers.items() if one.is_idle and one is not found]
        for other in idle[: max(0, len(idle) - KEPT)]:
            _servers.pop(other).close()
        return found


def _started(env: Mapping[str, str], modules: Sequence[str]) -> ForkServer:
    made = ForkServer(env, (WORKER, *modules), path=sys.path)
    try:
        made.wait()
    except RuntimeError:
        made.close()
        raise
    return made


def close_all() -> None:
    """Ends all servers of this process."""
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].close()


atexit.register(close_all)
