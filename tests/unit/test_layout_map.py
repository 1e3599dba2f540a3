"""LayoutMap: which rule a path finds, what is refused, and the text that people edit."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.algebra import Layout, Mesh
from unidist.errors import LayoutError
from unidist.planner.layout_map import LayoutMap

GRID = Mesh({"data": 2, "model": 3}, devices=range(6))


def rules(*patterns: str, layout: Any = ("model",), **options: Any) -> LayoutMap:
    return LayoutMap(GRID, dict.fromkeys(patterns, layout), **options)


def test_a_rule_matches_the_whole_path() -> None:
    found = rules("dense/kernel", ".*_2/kernel", "head")
    assert found.match("dense/kernel") == "dense/kernel"
    assert found.match("dense_2/kernel") == ".*_2/kernel"
    assert found.match("head/kernel") is None
    assert found.layout_for("head/kernel", (6,)) == Layout()
    assert found.unmatched(["dense/kernel", "head/kernel"]) == [".*_2/kernel", "head"]


def test_a_path_itself_comes_before_patterns() -> None:
    found = LayoutMap(GRID, {".*kernel": ("model",), "a/kernel": ("data",)})
    assert found.layout_for("a/kernel", (6,)) == Layout("data")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rules(".*kernel", "a.*").match("a/kernel"), r"matches several rules: \['\.\*kernel', 'a\.\*'\]"),
        (lambda: rules("kernel").check_used(["a/kernel"]), r"match no variable: \['kernel'\].*'a/kernel'"),
        (lambda: rules("("), "is no regular expression"),
        (lambda: rules("a", layout=("pipe",)), "names axis 'pipe'"),
        (lambda: rules("a", layout=Layout(partial="model")), "a variable is sharded or replicated"),
        (lambda: rules("a").layout_for("a", (4,)), r"dim 0 \(4\) does not divide over model \(3\)"),
        (
            lambda: rules("a", layout=Layout(("data", "model"))).layout_for("a", (4,)),
            r"dim 0 \(4\) does not divide over dataxmodel \(6\)",
        ),
        (lambda: rules("a", layout=(None, "model")).layout_for("a", (4,)), "shards dim 1 of a tensor that has 1 dims"),
        (lambda: LayoutMap.from_json("[]"), "no LayoutMap that to_json wrote"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        call()


def test_what_may_be_is_taken() -> None:
    rules("kernel", strict=False).check_used(["a/kernel"])
    assert rules("a", uneven=True).layout_for("a", (4,)) == Layout("model")


def test_it_comes_back_from_text() -> None:
    written = LayoutMap(GRID, {"a": ("data", None), "b": Layout(("data", "model")), "c": Layout(None, "model")})
    read = LayoutMap.from_json(written.to_json(), GRID)
    assert dict(read.items()) == dict(written.items())
    assert LayoutMap.from_json(written.to_json()).mesh == GRID
