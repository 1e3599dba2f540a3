"""Says which process failed first: one rule for all jobs of what is a cause and what a consequence.

- A process that the launcher ends is no failure: failures are taken before anything is ended, by signals too.
- A process whose errors say that it lost another failed in consequence. While there are only such, the one that was
  lost may still be ending: it is waited for, and not for long.
- One that has ended with exit code 0 before those that say so is the one that they lost: its program ended too soon.
- Of several causes the first is the one whose traceback began first; one without, from when its end was seen.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence

from unidist.launch.console import TRACEBACK, Console
from unidist.launch.jobs import Failure

# Seconds after a failure until its last words are read, and after the first until what caused it has ended too.
_WORDS_ARRIVE, _CAUSE_ARRIVES = 0.1, 10.0
# Ours, and what programs see that use a framework without us. gloo has no type of its own: torch and JAX pass its words
# on. A connection of the program's own, as to where it reads its data, may be a cause.
_LOST_ANOTHER = re.compile(
    r"ProcessLostError|HorovodInternalError|Dist(Backend|Network|Store)Error|errors_impl\.UnavailableError"
    # Joining. Of process 0 alone what it says may be a port that is in use.
    r"|BackendNotAvailableError: process(es)? .*did not come"
    r"|BackendNotAvailableError: process [1-9]\d* of \d+ (could not reach|did not meet) "
    r"|gloo.*(connection (closed|reset|refused|aborted)|broken pipe|(read|write) error|timed out|timeout)",
    re.IGNORECASE,
)
# JAX's coordination service, which aborts a process without a traceback of Python's, but with one of C++ after it. So
# does gloo where Horovod's processes meet.
_ABORTED = ("This most likely indicates that another task died", "throwing an instance of 'gloo::")
_LINES_AFTER = 100
_TORCHS_PREFIX = re.compile(r"\[rank\d+\]: ?")


# What a process has done that ended well, and left others waiting.
TOO_SOON = "ended with exit code 0 before the others were done"


class Judge:
    """Decides when it is known which process failed first, and which it was."""

    def __init__(self, console: Console, processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._processes, self._clock = console, processes, clock
        self._seen: dict[int | None, float] = {}
        self._done: dict[int, float] = {}

    def note(self, done: Iterable[int]) -> None:
        """Takes the ranks that have ended with exit code 0. To be called at each look, before `is_settled`."""
        for rank in done:
            self._done.setdefault(rank, self._clock())

    @property
    def done(self) -> dict[int, float]:
        """Returns when each rank that has ended with exit code 0 was seen to have, by the clock."""
        return dict(self._done)

    @property
    def too_soon(self) -> tuple[int, ...]:
        """Ranks that had ended with exit code 0 when the first failure was seen."""
        first = min(self._seen.values(), default=-math.inf)
        return tuple(sorted(rank for rank, at in self._done.items() if at <= first))

    def is_settled(self, failures: Sequence[Failure]) -> bool:
        """Returns whether nobody needs to be waited for any more.

        To be asked with all failures whenever there are some.
        """
        now = self._clock()
        for failure in failures:
            self._seen.setdefault(failure.rank, now)
        heard = [failure for failure in failures if now - self._seen[failure.rank] >= _WORDS_ARRIVE]
        have_all_ended = len(heard) + len(self._done) == self._processes
        if have_all_ended or any(not self.is_consequence(failure) for failure in heard):
            return True
        return now - min(self._seen.values()) >= _CAUSE_ARRIVES

    def first(self, failures: Sequence[Failure]) -> Failure:
        """The one that failed first."""
        causes = [failure for failure in failures if not self.is_consequence(failure)]
        return min(causes or failures, key=self._began)

    def _began(self, failure: Failure) -> float:
        found = self._console.traceback(failure.rank) if failure.rank is not None else None
        return found[0] if found else self._seen[failure.rank]

    def is_consequence(self, failure: Failure) -> bool:
        """Returns whether a process failed because it lost another, as its errors say."""
        if failure.rank is None:
            return False
        found = self._console.traceback(failure.rank)
        if found is None:
            said = "\n".join(self._console.last_lines(failure.rank, _LINES_AFTER))
            return any(words in said for words in _ABORTED)
        return any(_LOST_ANOTHER.search(line) for line in _errors(found[1]))


def _errors(lines: Sequence[str]) -> list[str]:
    errors: list[str] = []
    within = False
    for line in lines:
        said = _TORCHS_PREFIX.sub("", line, count=1)
        if said.endswith(TRACEBACK):
            within = True
        elif within and said.strip("^~ ") and not said.startswith(" "):
            errors.append(said)
            within = False
    return errors
