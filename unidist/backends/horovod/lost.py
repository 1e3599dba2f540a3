"""What Horovod raises when ranks disagree or one of them is gone, told as our errors; and waiting with a deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from unidist.errors import DesyncError, ProcessLostError, UnidistError

# Horovod raises one type for both: only its words tell a disagreement of the ranks from a peer that is gone.
_DISAGREE = re.compile(r"mismatch|but (another|some) rank|all ranks must|same name", re.IGNORECASE)
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


@dataclass(frozen=True, slots=True)
class Call:
    """A collective for messages: what it is, what it is for, and who takes part."""

    what: str
    ranks: tuple[int, ...]
    purpose: str

    def __str__(self) -> str:
        aim = f" for {self.purpose!r}" if self.purpose else ""
        return f"{self.what}{aim} over ranks {list(self.ranks)}"


def failure(error: HorovodInternalError, at: Call) -> UnidistError:
    """The error that Horovod's means."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if _DISAGREE.search(lines[0]):
        return DesyncError(
            f"{at}: the ranks disagree: {lines[0]}", ranks=at.ranks, collective=at.what, variable=at.purpose or None
        )
    return ProcessLostError(
        f"{at}: another process of the group ended or did not come in time ({lines[0]}). Look at the output of the "
        "other processes for the first error; then start all processes again"
    )


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
