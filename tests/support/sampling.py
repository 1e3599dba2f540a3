"""Matrices of test cases, sampled so that every value, or every pair of values, that can occur does.

Most mistakes need one value or two at once to show (D. R. Kuhn, D. R. Wallace and A. M. Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004); the full product of some factors costs minutes. With
TESTS_ALL=1 (`python3 ci/test.py --all`) it runs whole; TESTS_SEED draws another sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any, TypeVar

USUAL = 20
SEED = int(os.environ.get("TESTS_SEED", USUAL))
WHOLE = os.environ.get("TESTS_ALL") == "1"

_Row = TypeVar("_Row", bound=tuple[Hashable, ...])
_Value = TypeVar("_Value")


def pairwise(rows: Iterable[_Row], cost: Callable[[_Row], float] = lambda _: 0.0) -> list[_Row]:
    """Those of the rows in which each pair of values of two columns occurs that does in all, in their order.

    Of rows with as many new pairs the cheapest is taken, then the seed decides.
    """
    return _covering(list(rows), lambda row: set(combinations(enumerate(row), 2)), cost)


def each_value(
    rows: Iterable[_Row],
    columns: Callable[[_Row], tuple[Hashable, ...]] = lambda row: row,
    cost: Callable[[_Row], float] = lambda _: 0.0,
) -> list[_Row]:
    """Those of the rows in which each value of each column occurs, in their order.

    For programs that one engine runs in many places. What must meet, as a mesh and a stage, is one column.
    """
    return _covering(list(rows), lambda row: set(enumerate(columns(row))), cost)


def unless_all(few: _Value, every: _Value) -> _Value:
    """The first; with TESTS_ALL=1 the second."""
    return every if WHOLE else few


def _covering(every: list[_Row], parts: Callable[[_Row], set[Any]], cost: Callable[[_Row], float]) -> list[_Row]:
    """Greedy: the row with most parts that are new comes next."""
    if WHOLE:
        return every
    draw = random.Random(SEED)
    of = [parts(row) for row in every]
    left = set().union(*of)
    order = sorted(draw.sample(range(len(every)), len(every)), key=lambda k: cost(every[k]))
    chosen: list[int] = []
    while left:
        best = max(order, key=lambda k: len(left & of[k]))
        chosen.append(best)
        left -= of[best]
    return [every[k] for k in sorted(chosen)]
