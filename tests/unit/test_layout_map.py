"""LayoutMap: which rule a path follows."""

import pytest

from unidist import LayoutMap
from unidist.algebra import Layout, Mesh
from unidist.errors import LayoutError

MESH = Mesh({"data": 2, "model": 2}, devices=range(4))
CUT, TURNED = Layout("model"), Layout(None, "model")


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
