"""What process 0 has, on every process."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from unidist.backends.protocol import Array
from unidist.errors import DesyncError


def bytes_of_first(
    data: bytes, broadcast: Callable[[Array], Array], *, is_first: bool, ranks: tuple[int, ...]
) -> bytes:
    """The first process's bytes on every process. Two broadcasts: of their mark, length and checksum, then of them.

    Args:
        data: of the first process; what others give is not looked at.
        broadcast: the first process's array of those that all processes give, of one shape and dtype (int32, then
            uint8).
        is_first: whether this process is the one that `broadcast` sends from.
        ranks: of this process, for the error.

    Raises:
        DesyncError: what came is not what the first process sent.
    """
    own = np.frombuffer(data if is_first else b"", np.uint8)
    # Only the first process's has the mark, so that another's is known for what it is.
    announced = np.array([is_first, len(own), _checksum(data) if is_first else 0], np.int32)
    came = np.asarray(broadcast(announced))
    if came.shape != announced.shape or came[0] != 1 or came[1] < 0 or (is_first and (came != announced).any()):
        raise _changed(f"{came.tolist()} in place of its announcement", ranks)
    length, checksum = int(came[1]), int(came[2])
    if not length:
        return b""
    found = np.asarray(broadcast(own if is_first else np.zeros(length, np.uint8))).tobytes()
    if len(found) != length or _checksum(found) != checksum:
        raise _changed(f"{len(found)} bytes, other than the {length} that it announced", ranks)
    return found


def _checksum(data: bytes) -> int:
    """31 bits, which an int32 holds."""
    return zlib.crc32(data) & 0x7FFFFFFF


def _changed(found: str, ranks: tuple[int, ...]) -> DesyncError:
    return DesyncError(
        f"rank {', '.join(map(str, ranks))}: broadcast of the first process's bytes: {found} came. Every process must "
        "come to the same calls in the same order: look at the output of the others for one that went another way, "
        "then start all processes again",
        ranks=ranks,
        collective="broadcast",
    )
