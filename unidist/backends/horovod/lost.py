"""Turns Horovod's errors, of ranks that disagree or are gone, into ours; and waits with a deadline."""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from unidist.backends import ending, joining
from unidist.errors import DesyncError, ProcessLostError, UnidistError

# Horovod raises one type for both: only its words tell a disagreement of the ranks from a peer that is gone.
_DISAGREE = re.compile(r"mismatch|but (another|some) rank|all ranks must|same name", re.IGNORECASE)
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
# Who has waited so long asks whether Horovod is over, and again after twice as long; how long that may take, and how
# long an operation's own answer may then.
_FIRST_QUESTION, _ASKING_SECONDS, _LAST_ANSWERS = 0.5, 0.2, 1.0
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
    """Returns whether the ranks came with different things: all get the error, and Horovod goes on."""
    return bool(_DISAGREE.search(_first_line(error)))


def where(at: Call) -> bytes:
    """Returns what this rank sends to the others of where it is: as many bytes on each."""
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
    return joining.lost(str(at), line)


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
    return joining.lost(str(at), f"waited {timeout:g} s")


def polled(is_done: Callable[[], Any]) -> Callable[[float], bool]:
    """Makes what `wait` asks, of something that can only be looked at.

    Horovod's own wait keeps a core busy.
    """

    def has_come(seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return True

    return has_come


def wait(has_come: Callable[[float], bool], at: Call, timeout: float, hvd: Any) -> None:
    """Returns once it has come. Horovod's own wait has no end.

    Args:
        has_come: waits for so many seconds at most; whether it has come.
        hvd: Horovod of the framework.

    Raises:
        ProcessLostError: it has not come within `timeout` seconds, or Horovod is over before.
    """
    deadline, span = time.monotonic() + timeout, _FIRST_QUESTION
    while not has_come(min(span, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise late(at, timeout)
        if is_over(hvd):
            if has_come(_LAST_ANSWERS):
                return
            raise failure(HorovodInternalError("Horovod has ended in this process"), at)
        span *= 2


def is_over(hvd: Any) -> bool:
    """Returns whether Horovod has ended in this process: what is unfinished then is never finished.

    It ends when a process is lost, and fails all that is under way. What is given to it at that moment may miss this,
    and is never answered: Horovod looks whether it goes on, and only then puts an operation with the others.

    Asked beside, because Horovod holds a lock while it waits for a process that has stopped. False where it does.
    """
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(_world_is_gone(hvd)), daemon=True)
    asking.start()
    asking.join(_ASKING_SECONDS)
    return found == [True]


def _world_is_gone(hvd: Any) -> bool:
    if not hvd.is_initialized():
        return True
    ranks = (ctypes.c_int * hvd.size())()
    return int(hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_process_set_ranks(ctypes.c_int(0), ranks)) < 0
