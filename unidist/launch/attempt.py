"""One attempt at a run: starts its processes, watches until one fails or all have ended, ends all."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from unidist.backends.desync import ranks_text
from unidist.backends.environment import timeout
from unidist.flight.form import END, LEFT, file_of
from unidist.flight.reading import Flight, order, read_all
from unidist.launch import stalls
from unidist.launch.causes import TOO_SOON, Judge
from unidist.launch.console import Console
from unidist.launch.ending import end, mark, send
from unidist.launch.jobs import Failure, Job
from unidist.launch.preloading import Preloading
from unidist.launch.stalls import Stall

# What timeout(1) ends with.
GIVEN_UP = 124
# Signals by which schedulers tell that a job's time is over. SIGUSR1: srun's --signal=USR1@60.
ASKS_TO_LEAVE = (signal.SIGTERM, signal.SIGUSR1)
_POLL, _LOOK = 0.05, 0.25
# Seconds without a sign of life (they come four times a second) after which one that shall end is not waited for.
_DEAF = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """Says how an attempt ended.

    Attributes:
        code: the run's exit code, were this its last attempt.
        what: in one line; "" where all went well.
        heading: what the details are.
        details: lines that explain it: a traceback, the last words, stacks.
        has_failed: whether a process failed, or stalled, or left because it was asked to.
        is_consequence: whether it failed, as it says, because another did.
        is_silent: whether what failed is a process that runs, and gave no sign of life.
        late: processes of this node that waited for nobody when the attempt ended.
        done: those that had ended with exit code 0.
        flights: the records of this node's processes.
    """

    code: int
    what: str = ""
    heading: str = ""
    details: Sequence[str] = ()
    has_failed: bool = False
    is_consequence: bool = False
    is_silent: bool = False
    late: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    flights: Mapping[int, Flight] = field(default_factory=dict)

    @property
    def progress(self) -> int:
        return max((flight.progress for flight in self.flights.values()), default=0)

    @property
    def committed(self) -> int | None:
        return max((one.committed for one in self.flights.values() if one.committed is not None), default=None)


class Others:
    """Other nodes: there are none."""

    @property
    def stop(self) -> str | None:
        """Why the attempt must end now, or None."""
        return None

    @property
    def leave(self) -> bool:
        """Is true where trainings shall save, and leave, because there are more nodes now."""
        return False

    @property
    def absent(self) -> Mapping[int, float]:
        """Returns when ranks of other nodes were seen to have ended well before they joined, by the clock."""
        return {}

    def failed(self, what: str) -> None:
        """Reports to them that something has failed here."""


class Attempt:
    """One attempt.

    Args:
        job: starts the processes.
        console: takes what they print.
        folder: takes their records.
        received: signals that the launcher has received; may grow.
        preloading: gets ready for the next attempt.
        others: the nodes beside this one.
    """

    def __init__(
        self,
        job: Job,
        console: Console,
        folder: Path,
        received: Sequence[int],
        preloading: Preloading,
        others: Others | None = None,
    ) -> None:
        self._nodes = others or Others()
        self._job, self._console, self._folder, self._received = job, console, folder, received
        self._preloading = preloading
        self._request = job.request
        self._ranks = tuple(self._request.rank(local) for local in range(self._request.processes))
        self._failures: list[Failure] | None = None
        self._stall: Stall | None = None
        self._stopped: str | None = None
        self._late: tuple[int, ...] = ()
        self._reason: str | None = None
        self._stacks: list[str] = []
        self._looked = 0.0
        self._judge = Judge(console, self._request.processes)

    def run(self, environ: Mapping[str, str], give_up: Callable[[], str | None]) -> Ended:
        """Starts the processes, and returns when nothing of them runs any more.

        Args:
            environ: their environment, but for what the job gives each.
            give_up: asked again and again: why all shall be ended now, or None.
        """
        run_id = uuid.uuid4().hex
        marked = dict(environ)
        mark(marked, run_id)
        stood: dict[Path, bytes] = {}
        try:
            self._job.start(marked, self._console)
            self._watch(give_up)
            self._tell_others()
            if self._stall is not None:
                # One that was stopped goes on where it is woken, and so would its record.
                stood = stalls.records(self._folder)
                self._stacks = stalls.stacks(self._folder, self._flights(), self._stall.ranks)
        finally:
            asked = len(self._received)
            if self._received:
                self._leave()
            elif self._failures or self._stall or self._stopped:
                self._let_go()
            self._kill_stalled()
            grace, groups = self._request.grace, self._job.groups()
            end(run_id, groups, self._job.running, grace, lambda: len(self._received) > asked, self._deaf)
            self._console.finish()
            self._job.close()
            for path, data in stood.items():
                with contextlib.suppress(OSError):
                    path.write_bytes(data)
        return self._ended(self._flights())

    # watching ---------------------------------------------------------------------------------------------------------

    def _watch(self, give_up: Callable[[], str | None]) -> None:
        left_by: float | None = None
        is_leaving, limit = False, self._request.timeout or timeout()
        while not self._received and not self._console.closed.is_set():
            failures = self._failures = self._job.poll()
            self._judge.note(self._job.done())
            now = time.monotonic()
            if failures == []:
                return
            if failures and all(failure.exit_code == LEFT for failure in failures):
                # They save together, and leave one after the other.
                left_by = left_by or now + self._request.grace
                if len(failures) == self._request.processes or now > left_by:
                    return
            elif failures and self._judge.is_settled(failures):
                return
            if failures is None and (reason := give_up()):
                self._reason = reason
                return
            if self._nodes.leave and not is_leaving:
                is_leaving = self._ask_to_leave()
            if (stopped := self._nodes.stop) is not None:
                self._stopped = stopped
                return
            if now - self._looked > _LOOK:
                self._looked = now
                flights = self._flights()
                self._preloading.look(self._folder, flights)
                waited_for = self._waited_for(failures)
                done = {**self._judge.done, **self._nodes.absent}
                if (found := stalls.find(flights, waited_for, limit, now, done)) is not None:
                    self._stall = found
                    return
            time.sleep(_POLL)

    def _tell_others(self) -> None:
        flights = self._flights()
        still = [rank for rank in self._waited_for(self._failures) if rank not in self._done]
        self._late = stalls.late(flights, still)
        told = self._ended(flights)
        if told.code and self._stopped is None:
            self._nodes.failed(told.what)

    @property
    def _done(self) -> tuple[int, ...]:
        return tuple(sorted(self._judge.done))

    def _waited_for(self, failures: Sequence[Failure] | None) -> list[int]:
        failed = {failure.rank for failure in failures or ()}
        return [rank for rank in self._ranks if rank not in failed]

    def _flights(self) -> dict[int, Flight]:
        return {rank: flight for rank, flight in read_all(self._folder).items() if rank in self._ranks}

    # ending -----------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Ends those that wait, where no signal's handler runs, for a process that is gone."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                order(file_of(self._folder, rank), END)

    def _deaf(self) -> list[int]:
        """Processes that were let go, and wait in C where no thread of theirs hears of it."""
        if self._received or not (self._failures or self._stall or self._stopped):
            return []
        last = time.monotonic() - _DEAF
        return [one.pid for one in self._flights().values() if one.pid and one.beat < last]

    def _kill_stalled(self) -> None:
        """Ends those that would not hear of being asked. What writes a checkpoint for them has its time."""
        if self._stall is not None:
            flights = self._flights()
            _send(signal.SIGKILL, [flights[rank] for rank in self._stall.ranks if rank in flights])

    def _leave(self) -> None:
        """Asks trainings that can to save and to leave, and waits for them."""
        asked, deadline = len(self._received), time.monotonic() + self._request.grace
        if self._received[0] not in ASKS_TO_LEAVE or not self._ask_to_leave():
            return
        while self._job.at_work() and time.monotonic() < deadline and len(self._received) == asked:
            time.sleep(_POLL)

    def _ask_to_leave(self) -> bool:
        """Asks all processes to save and to leave, if all of them would. Whether they were asked."""
        flights = self._flights()
        can = [flight.saves or flight.left for flight in flights.values()]
        if len(can) < len(self._ranks) or not all(can):
            return False
        _send(signal.SIGTERM, flights.values())
        return True

    # what it was ------------------------------------------------------------------------------------------------------

    def _ended(self, flights: dict[int, Flight]) -> Ended:
        how = partial(Ended, late=self._late, done=self._done, flights=flights)
        if self._received:
            name = signal.Signals(self._received[0]).name
            if flights and all(flight.left for flight in flights.values()):
                return how(LEFT, f"{name}: all processes have saved and left; started again the training goes on")
            return how(128 + self._received[0], f"{name}: all processes were ended")
        if self._stall is not None:
            where = f"where {ranks_text(self._stall.ranks)} stood:" if self._stacks else ""
            is_silent = self._stall.is_silent
            ended = (*self._done, *self._nodes.absent)
            done = [rank for rank in ended if is_silent or rank in self._stall.ranks]
            said = f"; {ranks_text(done)} {TOO_SOON}" if done else ""
            what = f"{self._stall}{said}{self._others()}"
            return how(GIVEN_UP, what, where, self._stacks, has_failed=True, is_silent=is_silent and not done)
        if self._reason:
            return how(GIVEN_UP, f"{self._reason}: all processes were ended")
        if self._stopped is not None and not self._failures:
            return how(GIVEN_UP, self._stopped, has_failed=True, is_consequence=True)
        if self._failures is None:
            return how(128 + signal.SIGPIPE)
        if not self._failures:
            return how(0)
        if all(failure.exit_code == LEFT for failure in self._failures):
            return how(LEFT, "asked to leave: the processes have saved and left", has_failed=True)
        first = self._judge.first(self._failures)
        is_consequence = self._judge.is_consequence(first) and not self._judge.too_soon
        return how(*self._told(first), has_failed=True, is_consequence=is_consequence)

    def _others(self) -> str:
        return "; the others were ended" if self._request.processes > 1 else ""

    def _told(self, first: Failure) -> tuple[int, str, str, list[str]]:
        """(exit code, which rank failed first and how, what the lines are, its traceback)."""
        code = first.exit_code
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        exit_code = code if code > 0 else 128 - code
        if first.rank is None:
            what = f"what starts the processes, or where they meet, ended with {how}; what it said is above"
            return exit_code, what, "", []
        found = self._console.traceback(first.rank)
        lines = found[1] if found else self._console.last_lines(first.rank)
        what = f"rank {first.rank} of {self._request.world_size} failed first, with {how}{self._others()}"
        said = "its traceback:" if found else "the last it said on standard error:" if lines else "it said nothing"
        if (done := self._judge.too_soon) and self._judge.is_consequence(first):
            what = f"{ranks_text(done)} of {self._request.world_size} {TOO_SOON}{self._others()}"
            said = f"rank {first.rank}'s traceback:"
        return exit_code, what, said, [f"[{first.rank}] {line}" for line in lines]


def _send(number: signal.Signals, flights: Iterable[Flight]) -> None:
    for flight in flights:
        if flight.pid:
            send(flight.pid, number)
