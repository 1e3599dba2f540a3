"""Units of variables, and how often a step fetches them."""

from __future__ import annotations

from unidist.planner.fetching import Member, fetches, units


def test_small_neighbours_share_a_unit_up_to_a_size() -> None:
    layers = [[Member(0, "a", 60), Member(1, "a", 60)], *([Member(k, "bab"[k - 2], 10)] for k in (2, 3, 4))]
    # A layer is in one unit, though that grows beyond the size; kinds do not mix.
    assert units(layers, 100) == {0: 0, 1: 0, 2: 1, 3: 2, 4: 1}
    assert units(layers, 1) == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}
    assert units(layers, 1000) == {0: 0, 1: 0, 2: 1, 3: 0, 4: 1}


def test_what_is_there_is_not_fetched_again() -> None:
    assert fetches([0], [0]) == {0: 1}
    # The last is there when backward begins, and so is the one that it needs next.
    assert fetches([0, 1, 2, 3], [3, 2, 1, 0]) == {0: 2, 1: 2, 2: 1, 3: 1}
    assert fetches([0, 0, 1, 2], []) == {0: 1, 1: 1, 2: 1}
    # What comes back after others has gone in between.
    assert fetches([0, 1, 2, 0], []) == {0: 2, 1: 1, 2: 1}
    assert fetches([], []) == {}
