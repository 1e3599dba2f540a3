"""The threads of virtual ranks: one for each, parked until it is handed the baton."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from unidist.errors import MeshError

# Virtual memory, touched only as far as it is used. Python's own recursion limit is reached within an eighth of it.
STACK_BYTES = 4 * 2**20
# Seconds in which parked threads end.
PATIENCE = 5.0
_stack_size = threading.Lock()


class Work(Protocol):
    """The work of a crew's threads until all of them have ended: a run (scheduler.py)."""

    begun: bool
    ended: list[int]

    def work(self, rank: int) -> None:
        """A rank's part, from its baton to the end."""

    def meet(
        self,
        rank: int,
        ranks: tuple[int, ...],
        tag: Hashable,
        value: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """This rank's result of a collective of the ranks."""


class _Here(threading.local):
    rank: int | None = None
    crew: Crew | None = None


here = _Here()


class Abort(BaseException):
    """Unwinds a rank after another one failed. No Exception, so that `except Exception` does not stop it."""


def current_rank() -> int | None:
    """The rank of the calling thread, or None where it is no virtual rank's."""
    return here.rank


class Crew:
    """The threads of a world, one for each rank, each parked on its baton.

    They do not know the world itself, so that it can be collected; its key says whose they are.
    """

    def __init__(self, n: int, key: object) -> None:
        self.key = key
        self.process = os.getpid()
        self.closed = False
        self.run: Work | None = None
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
        here.rank, here.crew = rank, self
        while not self.closed:
            self.batons[rank].acquire()
            if self.run is not None:
                self.run.work(rank)

    def close(self) -> None:
        """Ends the parked threads now, and those at work when they are through.

        The latter are of a run that was left behind.
        """
        if self.closed or self.process != os.getpid():
            return
        self.closed = True
        begun = self.run is not None and self.run.begun
        ending = tuple(self.run.ended) if self.run is not None and begun else range(len(self.batons))
        for rank in ending:
            self.batons[rank].release()
        # A thread that ends while Python does, and lets go of a tensor, aborts the process in torch's C++.
        give_up = time.monotonic() + PATIENCE
        for thread in (self.threads[rank] for rank in ending):
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up - time.monotonic()))

    def places_of(self, ranks: tuple[int, ...]) -> dict[int, int]:
        found = self.places.get(ranks)
        if found is None:
            found = {rank: place for place, rank in enumerate(ranks)}
            n = len(self.batons)
            if len(found) != len(ranks) or not all(0 <= rank < n for rank in ranks):
                raise MeshError(f"{ranks} is no group of ranks of a world of {n}: a rank is beyond it or comes twice")
            self.places[ranks] = found
        return found
