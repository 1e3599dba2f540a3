"""Watch: a thread that finds out why a collective does not end, long before the timeout.

What runs through costs it nothing: it looks twice a second where this process waits. What waits for long is posted in
the world's store, and the posts of the others tell whether anyone may still come (posts.py).
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from unidist import events
from unidist.algebra import Group
from unidist.backends.desync import line_of
from unidist.backends.noting import noted, told
from unidist.backends.torch import posts
from unidist.backends.torch.calls import Key, described
from unidist.backends.torch.joining import world_store
from unidist.backends.torch.lost import reraise
from unidist.backends.torch.posts import Failure, Post, Posts, Ranks, Wait
from unidist.errors import UnidistError

if TYPE_CHECKING:
    from unidist.backends.torch.transports import Transport, Transports

# Seconds between two looks: at first, and at most where a wait is long.
_OFTEN, _SELDOM = 0.5, 10.0
_SLOWER = 1.3
# Posts that are read in one look: in a large world the others come in the next ones.
_READ = 64
_ANSWER = timedelta(seconds=3)  # of the store
_NAP = timedelta(seconds=0.5)
# A tag on which nobody sends.
_NOBODY = 1 << 9


T = TypeVar("T")


class Waiting:
    """A call in which a thread of this process waits; without a transport, for the group to be made."""

    __slots__ = ("group", "key", "number", "purpose", "transport")

    def __init__(self, group: Group, key: Key) -> None:
        self.group, self.key = group, key
        self.number = 1
        self.transport: Transport | None = None
        self.purpose = events.purpose()


class _Question(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.answer: T | None = None
        self.answered = threading.Event()


class Watch:
    """Watches the waits of one process of a world.

    Args:
        rank: this process's.
        transports: those of this world so far.

    Attributes:
        waiting: what each thread waits in, by its identifier. The collectives keep it.
    """

    def __init__(self, rank: int, transports: Transports) -> None:
        self.waiting: dict[int, Waiting] = {}
        self._rank = rank
        self._transports = transports
        self._known: dict[int, Post] = {}
        self._own = Post(rank=rank, beat=0, begun={})
        self._suspects: dict[int, Post] = {}
        self._turn = 0
        self._store: Any = None
        self._found: UnidistError | None = None
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unidist-watch", daemon=True)
        self._thread.start()
        # A thread that is inside torch's store when Python ends takes the process down with SIGABRT.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the watch. What it asks the store at this moment is waited for, and not for long."""
        atexit.unregister(self.close)
        self._questions.put(None)
        self._thread.join(2 * _ANSWER.total_seconds())

    # in the thread that waits -----------------------------------------------------------------------------------

    def meet(self, group: Group, key: Key) -> None:
        """Returns when all members have come to make a process group, for their first call in it.

        Raises:
            DesyncError: some came to something else.
            ProcessLostError: some did not come in time.
        """
        waiting = self.waiting[threading.get_ident()] = Waiting(group, key)
        store, limit = world_store(), time.monotonic() + self._transports.timeout
        name = f"unidist/meet/{','.join(map(str, group.ranks))}"
        try:
            with noted(told("making the process group", group.ranks)):
                store.set(f"{name}/{self._rank}", b"")
                while True:
                    try:
                        store.wait([f"{name}/{rank}" for rank in group.ranks], _NAP)
                        return
                    except dist.DistStoreError as error:
                        if self._found is not None:
                            raise self._found from error
                        if time.monotonic() > limit:
                            reraise(error, "making the process group", group.ranks)
        except UnidistError as error:
            self.failed(error, waiting)
            raise
        finally:
            del self.waiting[threading.get_ident()]

    def explained(self, group: Ranks) -> UnidistError | None:
        """Why a collective over a group broke, where a rank has found out; None where a process was lost."""
        return self._found or self._asked(lambda: self._heard(group))

    def failed(self, error: UnidistError, waiting: Waiting) -> None:
        """Informs the ranks that wait for this one that it goes on no more."""
        self._asked(lambda: self._tell(error, waiting))

    def _asked(self, question: Callable[[], T]) -> T | None:
        """The watch's answer, if it comes soon: the process that keeps the store may be the one that is lost."""
        asked = _Question(question)
        self._questions.put(asked)
        asked.answered.wait(_ANSWER.total_seconds())
        return asked.answer

    # in the watch's own thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._reach()
        before: set[Waiting] = set()
        pause = _OFTEN
        while True:
            try:
                asked = self._questions.get(timeout=pause)
            except queue.Empty:
                now = dict(self.waiting)
                old = {thread: waiting for thread, waiting in now.items() if waiting in before}
                before = set(now.values())
                pause = min(_SELDOM, pause * _SLOWER) if old else _OFTEN
                # Where the store's process has ended, the collective ends as well.
                with contextlib.suppress(RuntimeError):
                    if old:
                        self._look(old)
                continue
            if asked is None:
                return
            with contextlib.suppress(RuntimeError):
                asked.answer = asked.function()
            asked.answered.set()

    def _heard(self, group: Ranks) -> UnidistError | None:
        self._read(group)
        failures = (self._known[rank].failure for rank in group if rank in self._known)
        failure = next((one for one in failures if one is not None and one.is_desync), None)
        return None if failure is None else failure.error(self._rank)

    def _tell(self, error: UnidistError, waiting: Waiting) -> None:
        self._post(replace(self._own, waits=(), failure=Failure.of(error, waiting.group.ranks, waiting.number)))

    def _look(self, old: dict[int, Waiting]) -> None:
        waits = {thread: _wait(waiting, thread) for thread, waiting in old.items()}
        self._post(replace(self._own, waits=tuple(waits.values()), failure=None))
        seen = {self._rank}
        groups = {rank for wait in waits.values() for rank in wait.group}
        while groups - seen:  # who waits for whom, as far as it leads from here
            fresh = groups - seen
            self._read(fresh)
            seen |= fresh
            groups |= {r for rank in fresh if rank in self._known for w in self._known[rank].waits for r in w.needs}
        everyone = {**self._known, self._rank: self._own}
        error = self._judged(waits.values(), everyone)
        if error is not None and self._still(old):
            self._found = error
            for waiting in old.values():
                self._tell(error, waiting)
                if waiting.transport is not None:
                    _break(waiting.transport)

    def _judged(self, waits: Iterable[Wait], everyone: Posts) -> UnidistError | None:
        for wait in waits:
            if (error := posts.failed_for(wait, everyone)) is not None:
                return error
        if (error := posts.disagreement(self._rank, everyone)) is not None:
            return error
        ranks = posts.stuck(everyone)
        again = all(rank == self._rank or self._waits_on(everyone[rank]) for rank in ranks)
        self._suspects = {rank: everyone[rank] for rank in ranks}
        return posts.deadlock(ranks, everyone) if self._rank in ranks and again else None

    def _waits_on(self, post: Post) -> bool:
        """Returns whether a suspect has posted the same again since the last look: an old post proves nothing."""
        before = self._suspects.get(post.rank)
        return before is not None and before.beat < post.beat and before.waits == post.waits

    def _still(self, old: dict[int, Waiting]) -> bool:
        return all(self.waiting.get(thread) is waiting for thread, waiting in old.items())

    # the store --------------------------------------------------------------------------------------------------

    def _post(self, post: Post) -> None:
        begun = {transport.ranks: transport.calls.number for transport in self._transports}
        begun |= {wait.group: max(wait.number, begun.get(wait.group, 0)) for wait in post.waits}
        self._own = replace(post, beat=self._own.beat + 1, begun=begun)
        self._reach().set(_key(self._rank), self._own.to_json())

    def _read(self, ranks: Iterable[int]) -> None:
        others = sorted(set(ranks) - {self._rank})
        if len(others) > _READ:
            self._turn = (self._turn + _READ) % len(others)
            others = (others[self._turn :] + others[: self._turn])[:_READ]
        store = self._reach()
        for rank in others:
            if store.check([_key(rank)]):
                self._known[rank] = Post.from_json(store.get(_key(rank)))

    def _reach(self) -> Any:
        """The world's store, over a connection of its own: another thread may wait on the first.

        Made while all are there: to a process that has ended it would be tried for the whole timeout.
        """
        if self._store is None:
            self._store = world_store().clone()
            self._store.set_timeout(_ANSWER)
        return self._store


def _key(rank: int) -> str:
    return f"unidist/waits/{rank}"


def _wait(waiting: Waiting, thread: int) -> Wait:
    group, call = waiting.group.ranks, described(waiting.key)
    details = dict(call.details)
    needs = group
    if "root" in details:
        needs = (group[int(str(details["root"]))],)
    elif "pairs" in details:
        pairs: Any = details["pairs"]
        needs = tuple(group[source] for source, destination in pairs if destination == waiting.group.index)
    return Wait(
        group=group,
        number=waiting.number,
        call=str(call),
        op=call.op,
        needs=needs,
        purpose=waiting.purpose,
        line=line_of(thread),
    )


def _break(transport: Transport) -> None:
    """Makes what waits on a group raise.

    gloo has no abort: a message that does not come in time closes all pairs, but where its own is closed already.
    """
    for place in range(transport.size) if transport.is_gloo else ():
        if place != transport.index:
            with contextlib.suppress(RuntimeError):
                transport.pg.recv([torch.zeros(1)], place, _NOBODY).wait(timedelta(milliseconds=1))


def can_watch() -> bool:
    """Returns whether the world has a store that can be asked from another thread."""
    return dist.is_initialized() and hasattr(world_store(), "clone")
