"""Containers that hold something else for each rank at work, for what Keras keeps on the layer."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator
from typing import Any

from unidist.keras.torch.context import frame


def _rank() -> int:
    here = frame()
    return -1 if here is None else here.rank


class PerRankList:
    """A list of losses for each rank, and one for no rank.

    Where none is at work it has, behind a step, the numbers of the first rank, which all have.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Any]] = {}
        self._first: int | None = None

    def _own(self) -> list[Any]:
        rank = _rank()
        if rank < 0 and self._first is not None:
            self._lists[rank] = [loss.detach() for loss in self._lists[self._first]]
            self._first = None
        return self._lists.setdefault(rank, [])

    def _written(self) -> list[Any]:
        own, rank = self._own(), _rank()
        if rank >= 0:
            self._first = rank if self._first is None else min(rank, self._first)
        return own

    def append(self, item: Any) -> None:
        self._written().append(item)

    def extend(self, items: Any) -> None:
        self._written().extend(items)

    def clear(self) -> None:
        self._written().clear()

    def __delitem__(self, key: Any) -> None:
        del self._written()[key]

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


class PerRankSet:
    """A set for each rank (and one for no rank)."""

    def __init__(self) -> None:
        self._sets: dict[int, set[Any]] = {}

    def _own(self) -> set[Any]:
        return self._sets.setdefault(_rank(), set())

    def add(self, item: Any) -> None:
        self._own().add(item)

    def clear(self) -> None:
        self._own().clear()

    def __contains__(self, item: Any) -> bool:
        return item in self._own()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


class PerRankIterator:
    """Gives each rank the same elements of an iterator.

    Where none is at work it gives what the first would be given, and then all have had that.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._given: deque[Any] = deque()  # to one rank, and not to all
        self._first = 0  # how many all have had
        self._had: dict[int, int] = {}

    def __iter__(self) -> PerRankIterator:
        return self

    def __next__(self) -> Any:
        here = frame()
        if here is None or not here.world.runs_several:
            return self._given.popleft() if self._given else next(self._iterator)
        had = self._had.setdefault(here.rank, 0)
        if had - self._first == len(self._given):
            self._given.append(next(self._iterator))
        found = self._given[had - self._first]
        self._had[here.rank] = had + 1
        while self._given and min(self._had.get(rank, 0) for rank in here.world.ranks) > self._first:
            self._given.popleft()
            self._first += 1
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def is_iterator(value: Any) -> bool:
    """Says whether what one rank takes of it another would miss."""
    return isinstance(value, Iterator) and not isinstance(value, (PerRankIterator, io.IOBase))
