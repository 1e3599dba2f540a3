"""Decides which virtual rank goes on when: a run, and the collectives at which its ranks meet.

world.py says the rule.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from unidist import events
from unidist.backends import desync
from unidist.backends.desync import Place
from unidist.backends.sim.threads import Abort, Crew
from unidist.errors import DesyncError, MeshError

_KIND = "virtual "  # of ranks, in messages


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


class Run:
    """One run: who can go on, who waits for whom. Only the rank with the baton touches it.

    The main thread may set `failure` besides.
    """

    def __init__(self, crew: Crew, task: Callable[[int], Any], on_turn: Sequence[Callable[[int], None]] = ()) -> None:
        self.crew = crew
        self.task = task
        self.on_turn = on_turn
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
                self._take_turn(rank)
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
        """Passes the baton to the next rank that can go on. The caller must then wait for its own, or end."""
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
            self._take_turn(rank)
            if self.failure is not None:
                raise Abort
        if meeting.error is not None:
            raise meeting.error
        result, meeting.results[place] = meeting.results[place], None
        return result

    def _take_turn(self, rank: int) -> None:
        for call in self.on_turn:
            call(rank)

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
