"""Posts: what a rank that waits for long sends to the others, and what follows from all of them.

A wait is stuck where a member that it needs can never come: one that waits itself in what is stuck, or that waits in
the same place for another call. What is stuck is found as in wait-for graphs of databases (Knapp, "Deadlock Detection
in Distributed Databases", 1987): all waits, less those that something may still end, until none is left to remove.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from unidist.backends import desync
from unidist.backends.desync import Place
from unidist.errors import DesyncError, ProcessLostError, UnidistError

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Holds what a rank waits in.

    Attributes:
        group: the ranks of the group.
        number: of the call on this group.
        call: the collective with its arguments.
        op: the collective.
        needs: the ranks without which it cannot end.
        purpose: what it is for, or "".
        line: the line of the program that called, or "".
    """

    group: Ranks
    number: int
    call: str
    op: str
    needs: Ranks
    purpose: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank goes on no more.

    Attributes:
        text: its error's.
        group, number: the call in which it was raised.
        is_desync: whether ranks disagree; else one was lost.
        ranks, collective, variable: the DesyncError's.
    """

    text: str
    group: Ranks
    number: int
    is_desync: bool
    ranks: Ranks = ()
    collective: str | None = None
    variable: str | None = None

    @classmethod
    def of(cls, error: UnidistError, group: Ranks, number: int) -> Failure:
        if isinstance(error, DesyncError):
            more: dict[str, Any] = {"ranks": error.ranks, "collective": error.collective, "variable": error.variable}
            return cls(text=str(error), group=group, number=number, is_desync=True, **more)
        return cls(text=str(error), group=group, number=number, is_desync=False)

    def error(self, rank: int) -> UnidistError:
        """Returns what another rank raises that waited for this one."""
        if self.is_desync:
            return DesyncError(self.text, ranks=self.ranks, collective=self.collective, variable=self.variable)
        return ProcessLostError(f"rank {rank}, for which this one waits, has lost another process: {self.text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Says where a rank stands.

    Attributes:
        rank: the rank.
        beat: counts its posts.
        begun: how many calls it has begun, by group; 0 on others.
        waits: what its threads have waited in for long.
        failure: why it goes on no more, or None.
    """

    rank: int
    beat: int
    begun: Mapping[Ranks, int]
    waits: tuple[Wait, ...] = ()
    failure: Failure | None = field(default=None)

    def to_json(self) -> str:
        content = asdict(self)
        content["begun"] = [[list(group), count] for group, count in self.begun.items()]
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str | bytes) -> Post:
        content = json.loads(text)
        failure = content["failure"]
        return cls(
            rank=content["rank"],
            beat=content["beat"],
            begun={tuple(group): count for group, count in content["begun"]},
            waits=tuple(Wait(**_with_tuples(wait)) for wait in content["waits"]),
            failure=None if failure is None else Failure(**_with_tuples(failure)),
        )


Posts = Mapping[int, Post]


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def failed_for(wait: Wait, posts: Posts) -> UnidistError | None:
    """The error of a rank that the wait needs and that will not come any more."""
    for rank in wait.needs:
        post = posts.get(rank)
        failure = None if post is None else post.failure
        if post is None or failure is None:
            continue
        if post.begun.get(wait.group, 0) < wait.number or (failure.group, failure.number) == (wait.group, wait.number):
            return failure.error(rank)
    return None


def disagreement(rank: int, posts: Posts) -> DesyncError | None:
    """The error where another rank waits in the same place as this one for another call."""
    for wait in posts[rank].waits:
        there = [(other, found) for other, found in _same_place(wait, posts) if other != rank]
        if any(found.call != wait.call for _, found in there):
            return desync.mismatch(_place(rank, wait, ()), [_place(other, found, ()) for other, found in there])
    return None


def stuck(posts: Posts) -> frozenset[int]:
    """Returns the ranks that cannot go on, whatever the others do."""
    left = {rank for rank, post in posts.items() if post.waits}
    while True:
        free = {rank for rank in left if not all(left & set(missing(wait, posts)) for wait in posts[rank].waits)}
        if not free:
            return frozenset(left)
        left -= free


def deadlock(ranks: Iterable[int], posts: Posts) -> DesyncError:
    """The error for ranks that are stuck."""
    places = [_place(rank, wait, missing(wait, posts)) for rank in sorted(ranks) for wait in posts[rank].waits]
    return desync.deadlock(places)


def missing(wait: Wait, posts: Posts) -> Ranks:
    """The ranks that the wait needs and that, as far as is known, have not come to it."""
    needed = [rank for rank in wait.needs if rank in posts]
    return tuple(rank for rank in needed if posts[rank].begun.get(wait.group, 0) < wait.number)


def _same_place(wait: Wait, posts: Posts) -> Iterator[tuple[int, Wait]]:
    for rank in wait.group:
        for other in posts[rank].waits if rank in posts else ():
            if (other.group, other.number) == (wait.group, wait.number):
                yield rank, other


def _place(rank: int, wait: Wait, absent: Ranks) -> Place:
    return Place(
        rank=rank, group=wait.group, tag=wait.call, purpose=wait.purpose, missing=absent, line=wait.line, op=wait.op
    )
