"""What Horovod raises when ranks disagree or one of them is gone, as our errors; and waiting with a deadline."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from unidist.backends import ending
from unidist.errors import DesyncError, ProcessLostError, UnidistError

# Horovod raises one type for both: only its words tell a disagreement of the ranks from a peer that is gone.
_DISAGREE = re.compile(r"mismatch|but (another|some) rank|all ranks must|same name", re.IGNORECASE)
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
# Ranks that disagree tell each other where they are, in so many bytes. Seconds to wait for that.
_TOLD_BYTES = 512
TELLING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Call:
    """A collective for messages: what it is, what it is for, and who takes part."""

    what: str
    ranks: tuple[int, ...]
    purpose: str

    def __str__(self) -> str:
        aim = f" for {self.purpose!r}" if self.purpose else ""
        return f"{self.what}{aim} over ranks {list(self.ranks)}"


def disagrees(error: HorovodInternalError) -> bool:
    """Whether the ranks came with different things: all of them get the error, and Horovod goes on."""
    return bool(_DISAGREE.search(_first_line(error)))


def where(at: Call) -> bytes:
    """What this rank sends to the others of where it is: as many bytes on each."""
    told = [f"{at.what} for {at.purpose!r}" if at.purpose else at.what, ending.noted()]
    while len(data := json.dumps(told).encode()) > _TOLD_BYTES:
        told = [text[: len(text) // 2] for text in told]
    return data.ljust(_TOLD_BYTES)


def failure(error: HorovodInternalError, at: Call, told: bytes = b"") -> UnidistError:
    """The error that Horovod's means.

    Args:
        told: what all ranks have sent of where they are, in their order; nothing where they could not.
    """
    line = _first_line(error)
    if disagrees(error):
        apart, ranks = _apart(at, told)
        return DesyncError(
            f"{at}: the ranks disagree: {line.rstrip('.')}{apart}",
            ranks=ranks,
            collective=at.what,
            variable=at.purpose or None,
        )
    return ProcessLostError(
        f"{at}: another process of the group ended or did not come in time ({line}). Look at the output of the "
        "other processes for the first error; then start all processes again"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _apart(at: Call, told: bytes) -> tuple[str, tuple[int, ...]]:
    """(where the ranks are, if not at the same; those in which something was raised, else all)."""
    parts = [json.loads(told[k : k + _TOLD_BYTES]) for k in range(0, len(told), _TOLD_BYTES)]
    if len(parts) != len(at.ranks) or all(part == parts[0] for part in parts):
        return "", at.ranks
    found = dict(zip(sorted(at.ranks), parts, strict=True))
    said = "; ".join(
        f"rank {rank} came to {what}" + (f" after {raised!r} was raised in it" if raised else "")
        for rank, (what, raised) in found.items()
    )
    return f" ({said})", tuple(rank for rank, (_, raised) in found.items() if raised) or at.ranks


def late(at: Call, timeout: float) -> ProcessLostError:
    """For a collective that Horovod would wait in for ever, because every process is alive."""
    return ProcessLostError(
        f"{at}: another process of the group ended or did not come in time (waited {timeout:g} s). It may be "
        "elsewhere in its program: all ranks must come to the same collectives in the same order. Where it was only "
        "slow, give unidist.initialize (or unidist.use('horovod', timeout=...)) a longer timeout; then start all "
        "processes again"
    )


def wait(is_done: Callable[[], Any], at: Call, timeout: float) -> None:
    """Returns once it is done. Horovod's own wait keeps a core busy and has no end.

    Raises:
        ProcessLostError: it was not done within `timeout` seconds.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while not is_done():
        if time.monotonic() > deadline:
            raise late(at, timeout)
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
