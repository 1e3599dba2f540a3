"""Sampled matrices: no pair of values is lost, and nothing but repetition is left out."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support import sampling


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", False)


def pairs(rows: list[tuple[object, ...]]) -> set[object]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(4, 3, 12), (2, 2, 2, 2, 5), (3, 1), (6, 6, 6)])
def test_every_pair_occurs(sampled: None, sizes: tuple[int, ...]) -> None:
    every = list(product(*(range(size) for size in sizes)))
    found = sampling.pairwise(every)
    assert pairs(found) == pairs(every)
    assert len(set(found)) == len(found)
    one, other = sorted(sizes)[-2:]
    assert len(found) <= 1.5 * one * other


def test_what_cannot_occur_is_not_made_up(sampled: None) -> None:
    every = [row for row in product("ab", range(3), (True, False)) if row[:2] != ("a", 2)]
    found = sampling.pairwise(every)
    assert set(found) <= set(every)
    assert pairs(found) == pairs(every)


def test_two_columns_are_kept_whole(sampled: None) -> None:
    every = list(product(range(5), range(4)))
    assert sampling.pairwise(every) == every


def test_every_value_occurs_and_columns_that_must_meet_do(sampled: None) -> None:
    every = list(product(range(3), range(4), range(12)))
    assert len(sampling.each_value(every)) == 12
    found = sampling.each_value(every, lambda row: (row[:2], row[2]))
    assert {row[:2] for row in found} == set(product(range(3), range(4)))
    assert {row[2] for row in found} == set(range(12))
    assert len(found) == 12


def test_of_rows_that_cover_as_much_the_cheapest_is_taken(sampled: None) -> None:
    every = list(product(range(3), "ab"))
    assert {row[1] for row in sampling.each_value(every, lambda row: row[:1], cost=lambda row: row[1] == "a")} == {"b"}


def test_all_of_them_run_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", True)
    every = list(product(range(3), range(3), range(3)))
    assert sampling.pairwise(every) == sampling.each_value(every) == every


def test_one_seed_gives_one_sample(sampled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(product(range(5), range(5), range(5)))
    first = sampling.pairwise(every)
    assert sampling.pairwise(every) == first
    monkeypatch.setattr(sampling, "SEED", sampling.SEED + 1)
    assert sampling.pairwise(every) != first
