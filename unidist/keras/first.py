"""What process 0 has, on every process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from unidist.backends.protocol import Array


def bytes_of_first(data: bytes, broadcast: Callable[[Array], Array]) -> bytes:
    """Process 0's bytes on every process, of whatever length each has. Two broadcasts.

    Args:
        broadcast: process 0's array of those that all processes give, of one shape and dtype (int32, then uint8).
    """
    length = int(broadcast(np.array([len(data)], np.int32))[0])
    if not length:
        return b""
    own = np.frombuffer(data, np.uint8)[:length]
    return broadcast(np.pad(own, (0, length - len(own)))).tobytes()
