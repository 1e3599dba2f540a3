"""Matrices of test cases, sampled so that every pair of values that can occur does.

Most mistakes need one value or two at once to show (D. R. Kuhn, D. R. Wallace and A. M. Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004); the full product of some factors costs minutes. With
TESTS_ALL=1 (`python3 ci/test.py --all`) it runs whole; TESTS_SEED draws another sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import TypeVar

USUAL = 20
SEED = int(os.environ.get("TESTS_SEED", USUAL))
WHOLE = os.environ.get("TESTS_ALL") == "1"

_Row = TypeVar("_Row", bound=tuple[Hashable, ...])
_Value = TypeVar("_Value")


def pairwise(rows: Iterable[_Row], cost: Callable[[_Row], float] = lambda _: 0.0) -> list[_Row]:
    """Those of the rows in which each pair of values of two columns occurs that does in all, in their order.

    Greedy: the row with most pairs that are new comes next; of equals the cheapest, then the seed decides.
    """
    every = list(rows)
    if WHOLE:
        return every
    draw = random.Random(SEED)
    left = {pair for row in every for pair in _pairs(row)}
    order = sorted(draw.sample(range(len(every)), len(every)), key=lambda k: cost(every[k]))
    chosen: list[int] = []
    while left:
        best = max(order, key=lambda k: len(left & _pairs(every[k])))
        chosen.append(best)
        left -= _pairs(every[best])
    return [every[k] for k in sorted(chosen)]


def unless_all(few: _Value, every: _Value) -> _Value:
    """The first; with TESTS_ALL=1 the second."""
    return every if WHOLE else few


def _pairs(row: tuple[Hashable, ...]) -> set[Hashable]:
    return set(combinations(enumerate(row), 2))
