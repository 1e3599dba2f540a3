"""VirtualWorld: virtual ranks as threads of one process, one running at a time, handing over at each collective.

A rank that waits for a collective passes the baton to the next rank that can go on; the last one to arrive does the
group's work and goes on itself. Who runs when follows from what the ranks call and from nothing else, so two runs of
one program are equal bit by bit. When no rank can go on, the ranks disagree, and that is reported at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from unidist import events
from unidist.backends import desync
from unidist.backends.desync import Place
from unidist.errors import CapabilityError, DesyncError, MeshError

T = TypeVar("T")
Enter = Callable[[int], contextlib.AbstractContextManager[Any]]

# Virtual memory, touched only as far as it is used. Python's own recursion limit is reached within an eighth of it.
STACK_BYTES = 4 * 2**20
_stack_size = threading.Lock()
_KIND = "virtual "  # of ranks, in messages


class _Here(threading.local):
    rank: int | None = None
    crew: _Crew | None = None


_here = _Here()


class Abort(BaseException):
    """Unwinds a rank after another one failed. No Exception, so that `except Exception` does not stop it."""


def current_rank() -> int | None:
    """The rank of the calling thread, or None where it is no virtual rank's."""
    return _here.rank


class VirtualWorld:
    """n virtual ranks of this process. Their threads are started by the first run and parked between runs.

    Args:
        n: the number of ranks.

    Attributes:
        on_enter: hooks that carry thread-local state into the ranks. Each is called in the thread that calls `run`
            and returns enter(rank), a context manager in which that rank runs.

    Raises:
        MeshError: n is below 1.
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise MeshError(f"a world of virtual ranks needs at least one rank, found {n}")
        self.size = n
        self.on_enter: list[Callable[[], Enter]] = []
        self._crew: _Crew | None = None
        self._key = object()
        self._running = threading.Lock()
        self._end_crew: weakref.finalize[..., VirtualWorld] | None = None

    def run(self, fn: Callable[..., T], *per_rank: Sequence[Any]) -> list[T]:
        """fn(rank, ...) on every rank, while the calling thread waits.

        The caller's context variables are copied into each rank.

        Args:
            fn: called with the rank, then one element of each of `per_rank`.
            per_rank: sequences with one element for each rank.

        Returns:
            The results in rank order.

        Raises:
            DesyncError: the ranks called different collectives, or one did not come.
            CapabilityError: this world is running already.
            MeshError: a sequence has not one element for each rank.
            Exception: whatever a rank raised, as itself; the other ranks are unwound.
        """
        for values in per_rank:
            if len(values) != self.size:
                raise MeshError(f"run takes one element for each of the {self.size} ranks, found {len(values)}")
        enters = [capture() for capture in self.on_enter]

        def task(rank: int) -> T:
            with contextlib.ExitStack() as stack:
                for enter in enters:
                    stack.enter_context(enter(rank))
                return fn(rank, *(values[rank] for values in per_rank))

        if not self._running.acquire(blocking=False):
            raise CapabilityError(
                "this world of virtual ranks is running already: run() cannot be called by one of its ranks, "
                "nor by two threads at once"
            )
        try:
            run = self._see_through(task)
        finally:
            self._running.release()
        failure, run.failure = run.failure, None
        if failure is None:
            return run.results
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame

    def exchange(
        self,
        ranks: tuple[int, ...],
        tag: Hashable,
        value: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Meets the other ranks of a group.

        Args:
            ranks: the group, in the order of its places; the calling rank is among them.
            tag: what the rank calls for; must be equal on all of them (a desync.Call gives the best messages).
            value: what this rank brings.
            combine: called once, by the last to arrive, on the values in the order of `ranks`; gives one result for
                each place. What it raises is raised on every rank of the group.

        Returns:
            This rank's result.

        Raises:
            CapabilityError: the calling thread is not a rank of this world.
            MeshError: this rank is not in the group, or the group is none.
        """
        crew, rank = _here.crew, _here.rank
        if crew is None or rank is None or crew.key is not self._key or crew.run is None:
            raise CapabilityError(
                f"{tag} was called in thread {threading.current_thread().name!r}, which is no virtual rank of this "
                "world: call it inside of the function given to run()"
            )
        return crew.run.meet(rank, ranks, tag, value, combine)

    def close(self) -> None:
        """Ends the threads. A later `run` starts new ones.

        Raises:
            CapabilityError: the world is running.
        """
        if not self._running.acquire(blocking=False):
            raise CapabilityError("a world of virtual ranks cannot be closed while it runs")
        try:
            crew = self._crew
            self._let_go()
            for thread in crew.threads if crew is not None else ():
                thread.join()
        finally:
            self._running.release()

    def _let_go(self) -> None:
        """Asks the threads to end when they are through; the next run has new ones."""
        self._crew = None
        if self._end_crew is not None:
            self._end_crew()

    def _crew_of_this_process(self) -> _Crew:
        if self._crew is not None and self._crew.process != os.getpid():
            self._let_go()  # threads do not live on in a forked child
        if self._crew is None:
            self._crew = _Crew(self.size, self._key)
            self._end_crew = weakref.finalize(self, self._crew.close)
        return self._crew

    def _see_through(self, task: Callable[[int], Any]) -> _Run:
        """Starts a run and waits for its end. What interrupts the wait (Ctrl-C) unwinds the ranks first; a second
        interruption leaves a rank that does not stop to itself and the next run to new threads."""
        crew = self._crew_of_this_process()
        run = crew.run = _Run(crew, task)
        try:
            crew.batons[0].release()
            run.wait()
        except BaseException:
            run.fail(Abort())
            try:
                run.wait(begin_within=1.0)  # it may have been interrupted before the first baton was passed
            finally:
                if not run.over:
                    self._let_go()
            raise
        finally:
            if run.over:
                crew.run = None
        return run


class _Crew:
    """The threads of a world, one for each rank, each parked on its baton. They do not know the world itself, so that
    it can be collected; its key says whose they are."""

    def __init__(self, n: int, key: object) -> None:
        self.key = key
        self.process = os.getpid()
        self.closed = False
        self.run: _Run | None = None
        self.places: dict[tuple[int, ...], dict[int, int]] = {}
        self.batons = [threading.Lock() for _ in range(n)]
        for baton in self.batons:
            baton.acquire()
        self.threads = [
            threading.Thread(target=self._live, args=(rank,), name=f"rank {rank} of {n}", daemon=True)
            for rank in range(n)
        ]
        with _stack_size:
            before = threading.stack_size(STACK_BYTES)
            try:
                for thread in self.threads:
                    thread.start()
            finally:
                threading.stack_size(before)

    def _live(self, rank: int) -> None:
        _here.rank, _here.crew = rank, self
        while not self.closed:
            self.batons[rank].acquire()
            if self.run is not None:
                self.run.work(rank)

    def close(self) -> None:
        """Ends the parked threads now, and those at work (of a run that was left behind) when they are through."""
        if self.closed or self.process != os.getpid():
            return
        self.closed = True
        begun = self.run is not None and self.run.begun
        for rank in tuple(self.run.ended) if self.run is not None and begun else range(len(self.batons)):
            self.batons[rank].release()

    def places_of(self, ranks: tuple[int, ...]) -> dict[int, int]:
        found = self.places.get(ranks)
        if found is None:
            found = {rank: place for place, rank in enumerate(ranks)}
            n = len(self.batons)
            if len(found) != len(ranks) or not all(0 <= rank < n for rank in ranks):
                raise MeshError(f"{ranks} is no group of ranks of a world of {n}: a rank is beyond it or comes twice")
            self.places[ranks] = found
        return found


class _Meeting:
    """A collective for which not all ranks of its group have come yet."""

    __slots__ = ("arrived", "error", "purpose", "results", "tag", "values")

    def __init__(self, tag: Hashable, purpose: str, size: int) -> None:
        self.tag = tag
        self.purpose = purpose
        self.values: list[Any] = [None] * size
        self.arrived: list[int] = []
        self.results: list[Any] = []
        self.error: Exception | None = None


class _Run:
    """One run: who can go on, who waits for whom. Only the rank with the baton touches it (and the main thread,
    which may set `failure`)."""

    def __init__(self, crew: _Crew, task: Callable[[int], Any]) -> None:
        self.crew = crew
        self.task = task
        self.context = contextvars.copy_context()
        self.results: list[Any] = [None] * len(crew.batons)
        self.ready: deque[int] = deque(range(1, len(crew.batons)))
        self.waiting: dict[int, tuple[int, ...]] = {}
        self.meetings: dict[tuple[int, ...], _Meeting] = {}
        self.ended: list[int] = []
        self.failure: BaseException | None = None
        self.begun = False
        self.over = False
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self, begin_within: float = math.inf) -> None:
        """Returns when all ranks have ended, or none has begun within so many seconds."""
        give_up = time.monotonic() + begin_within
        while not self.over and (self.begun or time.monotonic() < give_up):
            self.done.acquire(timeout=1.0)  # without a timeout Windows would not let Ctrl-C through

    def fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure

    def work(self, rank: int) -> None:
        """A rank's part, from its baton to the end."""
        self.begun = True
        try:
            if self.failure is None:
                self.results[rank] = self.context.copy().run(self.task, rank)
        except Abort as abort:
            # What the rank was raising when it came to a collective that nobody joins is where the trouble began.
            if isinstance(self.failure, DesyncError) and self.failure.__context__ is None:
                self.failure.__context__ = abort.__context__
        except BaseException as error:  # raised as itself by the thread that called run()
            if self.failure is None:
                note = f"rank {rank} of {len(self.crew.batons)}"
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            self.fail(error)
        self.ended.append(rank)
        self.hand_over()

    def hand_over(self) -> None:
        """Passes the baton to the next rank that can go on. The calling one must then wait for its own, or end."""
        if self.failure is None and self.waiting and not self.ready:
            self.fail(desync.deadlock(self._waiting_places(), self.ended, kind=_KIND))
        if self.failure is not None and self.waiting:
            self.ready.extend(sorted(self.waiting))
            self.waiting.clear()
        if self.ready:
            self.crew.batons[self.ready.popleft()].release()
        else:
            self.over = True
            self.done.release()

    def meet(
        self,
        rank: int,
        ranks: tuple[int, ...],
        tag: Hashable,
        value: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        if self.failure is not None:
            raise Abort
        place = self.crew.places_of(ranks).get(rank)
        if place is None:
            raise MeshError(f"rank {rank} called {tag} for the ranks {ranks}, and is none of them")
        meeting = self._joined(rank, ranks, tag)
        meeting.values[place] = value
        meeting.arrived.append(rank)
        if len(meeting.arrived) == len(ranks):
            self._hold(meeting, ranks, combine)
        else:
            self.waiting[rank] = ranks
            self.hand_over()
            self.crew.batons[rank].acquire()
            if self.failure is not None:
                raise Abort
        if meeting.error is not None:
            raise meeting.error
        result, meeting.results[place] = meeting.results[place], None
        return result

    def _joined(self, rank: int, ranks: tuple[int, ...], tag: Hashable) -> _Meeting:
        purpose = events.purpose()
        meeting = self.meetings.get(ranks)
        if meeting is None:
            meeting = self.meetings[ranks] = _Meeting(tag, purpose, len(ranks))
        elif meeting.tag != tag or meeting.purpose != purpose:
            here = self._place(rank, ranks, tag, purpose, ())
            there = [self._place(r, ranks, meeting.tag, meeting.purpose, ()) for r in sorted(meeting.arrived)]
            self.fail(desync.mismatch(here, there, kind=_KIND))
            raise Abort
        return meeting

    def _hold(self, meeting: _Meeting, ranks: tuple[int, ...], combine: Callable[[list[Any]], Sequence[Any]]) -> None:
        del self.meetings[ranks]
        try:
            meeting.results = list(combine(meeting.values))
        except Exception as error:  # each rank of the group raises it
            meeting.error = error
        meeting.values = []
        for other in meeting.arrived[:-1]:
            del self.waiting[other]
            self.ready.append(other)

    def _waiting_places(self) -> list[Place]:
        places = []
        for rank, ranks in sorted(self.waiting.items()):
            meeting = self.meetings[ranks]
            missing = tuple(sorted(set(ranks) - set(meeting.arrived)))
            places.append(self._place(rank, ranks, meeting.tag, meeting.purpose, missing))
        return places

    def _place(self, rank: int, ranks: tuple[int, ...], tag: Hashable, purpose: str, missing: tuple[int, ...]) -> Place:
        line = desync.line_of(self.crew.threads[rank].ident)
        return Place(rank=rank, group=ranks, tag=tag, purpose=purpose, missing=missing, line=line)
