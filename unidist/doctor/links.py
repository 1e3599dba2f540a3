"""Tries a link: between whom, with which values, and how a value that is wrong is reported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from unidist.backends.protocol import Array

Pair: TypeAlias = tuple[int, int]

# Above it only neighbours on the ring are tried.
MOST_PAIRS = 64
# Before what a process of the world reports; all else that it prints is its framework's.
MARK = "unidist doctor: "
# Values of the two messages: one for latency, one for bandwidth.
SMALL, LARGE = 16, 2**20
_PERIOD = 1021


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Holds what the processes are given.

    Attributes:
        backend: the name given to `unidist.use`.
        processes: processes on each node: the first of them reports what all have found.
        timeout: seconds that a step may take after the world was joined.
        importing, joining: seconds for these. Who has imported waits at joining for those that have not.
        linger: seconds that a process which is late, or has failed, waits, so that the others tell of it too.
        small, large: how often each message is sent and timed.
    """

    backend: str
    processes: int
    timeout: float
    importing: float
    joining: float
    linger: float = 3.0
    small: int = 20
    large: int = 4

    def write(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Task:
        return Task(**json.loads(text))


def pairs(count: int) -> tuple[Pair, ...]:
    """The links that are tried among `count` ranks: all, or with many the neighbours on the ring."""
    every = tuple(combinations(range(count), 2))
    if len(every) <= MOST_PAIRS:
        return every
    return tuple((k, (k + 1) % count) for k in range(count))


def pattern(rank: int, length: int) -> Array:
    """A rank's values, which are not its neighbours': whole numbers from 1, whose sums float32 holds."""
    return ((np.arange(length) * 7 + rank * 131) % _PERIOD + 1).astype(np.float32)


def difference(found: Array, expected: Array) -> str | None:
    """Returns how two arrays differ; None where they are the same."""
    if found.shape != expected.shape:
        return f"shape {found.shape} instead of {expected.shape}"
    places = np.flatnonzero(found != expected)
    if not len(places):
        return None
    first = int(places[0])
    return (
        f"{len(places)} of {expected.size} values are wrong, the first at {first}: "
        f"{found.reshape(-1)[first]:g} instead of {expected.reshape(-1)[first]:g}"
    )
