"""The planted breakages of ci/breakages: each can be planted, and its tests are there. `ci/mutants.py` plants them."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from ci.mutants import ROOT, Breakage, breakages

ALL = breakages()
# Where each room's files are.
ROOMS = {
    "algebra": "unidist/algebra/",
    "array": "unidist/array/",
    "local": "unidist/backends/local.py",
    "sim": "unidist/backends/sim/",
    "torch": "unidist/backends/torch/",
    "jax": "unidist/backends/jax/",
    "tensorflow": "unidist/backends/tensorflow/",
    "horovod": "unidist/backends/horovod/",
    "strategies": "unidist/strategies/",
    "planner": "unidist/planner/",
    "checkpoint": "unidist/checkpoint/",
    "ledger": "unidist/ledger.py",
    "testing": "unidist/testing/",
    "explicit": "unidist/keras/torch/",
    "partitioned": "unidist/keras/jax/",
    "dtensor": "unidist/keras/tensorflow/",
    "replicated": "unidist/keras/tensorflow_horovod/",
    "planning": "unidist/keras/planning/",
}
# Test classes of backends inherit their methods from here.
SUITE = tuple((ROOT / "unidist" / "testing").rglob("*.py"))


@cache
def defined(path: Path) -> frozenset[str]:
    """The names of a file's functions and classes."""
    found = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef))


@cache
def inherited() -> frozenset[str]:
    return frozenset().union(*map(defined, SUITE))


@pytest.mark.parametrize("one", ALL, ids=[one.name for one in ALL])
def test_a_breakage_can_be_planted_and_its_tests_are_there(one: Breakage) -> None:
    text = (ROOT / one.file).read_text()
    assert text.count(one.old) == 1
    assert one.old != one.new
    ast.parse(text.replace(one.old, one.new))
    assert one.tests
    assert one.what.endswith(".")
    for test in one.tests:
        file, *names = test.partition("[")[0].split("::")
        here = defined(ROOT / file)
        assert set(names) <= (here | inherited() if len(names) == 2 else here)


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(one.name for one in ALL).items() if count > 1] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_breakages(room: str) -> None:
    assert [one.name for one in ALL if one.file.startswith(ROOMS[room])]


def test_there_are_enough() -> None:
    assert len(ALL) >= 80
