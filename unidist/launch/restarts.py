"""Restarts: decides if what has failed starts again, when, and with which error a run ends."""

from __future__ import annotations

from dataclasses import dataclass

# Restarts in a row that brought the training no further, after which there is no other.
FRUITLESS = 3
# Seconds before the second restart of those in a row, and before any.
_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Again:
    """The run is started again: the restart's number, from 1, and the seconds to wait before it."""

    number: int
    pause: float


def told(number: int, most: int, pause: float) -> str:
    """A restart, as the launcher reports it.

    Example:
        >>> told(2, 10, 1.0)
        'restart 2 of 10, in 1 s'
    """
    return f"restart {number} of {most}{f', in {pause:g} s' if pause else ''}"


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The run ends.

    Attributes:
        why: no further restart, or "" where none was wanted.
        attempt: the attempt whose error is the run's, from 0: the first since the training last came further.
    """

    why: str
    attempt: int


class Restarts:
    """Counts what has failed so far.

    Args:
        most: restarts that are allowed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._furthest = 0
        self._attempts = 0
        self._first = 0

    def after(self, progress: int) -> Again | GivenUp:
        """Returns what follows an attempt that has failed.

        Args:
            progress: steps that the training has made, before it was resumed too.
        """
        attempt, self._attempts = self._attempts, self._attempts + 1
        if progress > self._furthest:
            self._furthest, self._first = progress, attempt
        in_a_row = attempt - self._first
        if attempt >= self._most:
            why = f"no restart is left of {self._most}" if self._most else ""
            return GivenUp(why, self._first)
        if in_a_row >= FRUITLESS:
            return GivenUp(f"{in_a_row} restarts in a row brought the training no further", self._first)
        return Again(attempt + 1, min(_LONGEST_PAUSE, _PAUSE * 2 ** (in_a_row - 1)) if in_a_row else 0.0)
