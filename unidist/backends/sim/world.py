"""VirtualWorld: runs virtual ranks as threads of one process, one at a time, by turns at collectives.

A rank that waits for a collective passes the baton to the next rank that can go on; the last one to arrive does the
group's work and goes on itself. Who runs when follows from what the ranks call and from nothing else, so two runs of
one program are equal bit by bit. When no rank can go on, the ranks disagree, and that is reported at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from unidist.backends.sim.scheduler import Run
from unidist.backends.sim.threads import Abort, Crew, here
from unidist.errors import CapabilityError, MeshError

T = TypeVar("T")
Enter = Callable[[int], contextlib.AbstractContextManager[Any]]


class VirtualWorld:
    """n virtual ranks of this process. Their threads are started by the first run and parked between runs.

    Args:
        n: the number of ranks.

    Attributes:
        on_enter: hooks that carry thread-local state into the ranks. Each is called in the thread that calls `run`
            and returns enter(rank), a context manager in which that rank runs.
        on_turn: called with the rank, in its thread, each time that it begins or goes on.

    Raises:
        MeshError: n is below 1.
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise MeshError(f"a world of virtual ranks needs at least one rank, found {n}")
        self.size = n
        self.on_enter: list[Callable[[], Enter]] = []
        self.on_turn: list[Callable[[int], None]] = []
        self._crew: Crew | None = None
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
        crew, rank = here.crew, here.rank
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
            self._let_go()
        finally:
            self._running.release()

    def _let_go(self) -> None:
        """Asks the threads to end when they are through; the next run has new ones."""
        self._crew = None
        if self._end_crew is not None:
            self._end_crew()

    def _crew_of_this_process(self) -> Crew:
        if self._crew is not None and self._crew.process != os.getpid():
            self._let_go()  # threads do not live on in a forked child
        if self._crew is None:
            self._crew = Crew(self.size, self._key)
            self._end_crew = weakref.finalize(self, self._crew.close)
        return self._crew

    def _see_through(self, task: Callable[[int], Any]) -> Run:
        """Starts a run and waits for its end. What interrupts the wait (Ctrl-C) unwinds the ranks first.

        A second interruption leaves a rank that does not stop to itself and the next run to new threads.
        """
        crew = self._crew_of_this_process()
        run = crew.run = Run(crew, task, tuple(self.on_turn))
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
