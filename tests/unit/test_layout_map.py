"""LayoutMap: which rule a path finds, what is refused, and the text that people edit."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.algebra import Layout, Mesh
from unidist.errors import LayoutError
from unidist.planner.layout_map import LayoutMap

GRID = Mesh({"data": 2, "model": 3}, devices=range(6))
MESH = Mesh({"data": 2, "model": 2}, devices=range(4))
CUT, TURNED = Layout("model"), Layout(None, "model")


def rules(*patterns: str, layout: Any = ("model",), **options: Any) -> LayoutMap:
    return LayoutMap(GRID, dict.fromkeys(patterns, layout), **options)


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


@pytest.mark.parametrize("pattern", ["net/dense/kernel", "net/.*ense/kernel", "(?:net|head)/dense/kernel"])
@pytest.mark.parametrize("other", ["net/dense/kernel_1", "a/net/dense/kernel", "net/dense/kernel/bias"])
def test_a_rule_matches_a_whole_path(pattern: str, other: str) -> None:
    rules = LayoutMap(MESH, {pattern: CUT}, strict=False)
    assert rules.layout_for("net/dense/kernel", (4, 4)) == CUT
    assert rules.layout_for(other, (4, 4)) == Layout()
    assert other not in rules
    assert rules.unmatched([other]) == [pattern]
    assert rules.unmatched([other, "net/dense/kernel"]) == []


def test_alternatives_match_whole_paths_too() -> None:
    """A match that begins with the shorter one would end before the path does."""
    rules = LayoutMap(MESH, {"a/kernel|a/kernel_1": CUT, "b": TURNED}, strict=False)
    assert rules.match("a/kernel_1") == "a/kernel|a/kernel_1"
    assert rules.match("b/kernel") is None


def test_a_path_that_is_a_key_follows_it_whatever_else_matches() -> None:
    rules = LayoutMap(MESH, {"a/.*": CUT, "a/kernel": TURNED})
    assert rules["a/kernel"] == TURNED
    assert rules["a/bias"] == CUT
    # A path may hold what means something else in a rule.
    assert LayoutMap(MESH, {"a+b/kernel": CUT})["a+b/kernel"] == CUT


def test_a_path_of_two_rules_and_a_rule_of_no_path_are_told() -> None:
    rules = LayoutMap(MESH, {"a/.*": CUT, ".*/kernel": TURNED})
    with pytest.raises(LayoutError, match=r"'a/kernel' matches several rules: \['a/\.\*', '\.\*/kernel'\]"):
        rules.match("a/kernel")
    with pytest.raises(LayoutError, match=r"rules that match no variable: \['a/\.\*'\].*re\.fullmatch"):
        rules.check_used(["b/kernel", "b/a/bias"])
    LayoutMap(MESH, {"a/.*": CUT}, strict=False).check_used(["b/kernel"])
