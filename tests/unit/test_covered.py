"""ci/covered.toml: what runs with `--all` alone is covered by what always runs, and no planted breakage needs it."""

from __future__ import annotations

from collections import Counter

import pytest

from ci.mutants import breakages
from tests.support.covered import Covered, left_out, planted, register, unknown

ALL = register()


@pytest.mark.parametrize("one", ALL, ids=[one.ids[0] for one in ALL])
def test_what_covers_always_runs_and_why_is_said(one: Covered) -> None:
    assert one.by
    assert not left_out().intersection(one.by)
    assert one.why.endswith(".")


def test_a_case_is_named_once() -> None:
    assert [name for name, count in Counter(name for one in ALL for name in one.ids).items() if count > 1] == []


def test_each_planted_breakage_has_a_test_that_always_runs() -> None:
    """A test that is named without a case has none left out: nobody knows which of its cases notices."""
    beside = left_out() | {covered.test for covered in ALL}
    assert [one.name for one in breakages() if beside.issuperset(one.tests)] == []


def test_what_is_not_there_is_named() -> None:
    first, noticing = ALL[0].ids[0], min(name for name in planted() if name.endswith("]"))
    everything = [*planted(), *(name for one in ALL for name in (*one.ids, *one.by))]
    files = {name.partition("::")[0] for name in everything}
    assert unknown(everything, files) == []
    for gone in (first, noticing):
        assert gone in unknown([name for name in everything if name != gone], files)
    assert unknown([], {"tests/another.py"}) == []
