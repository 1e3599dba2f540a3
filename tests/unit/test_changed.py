"""`ci/changed.py` finds the tests that a change can break: planted mistakes, imports, and modules named in programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.changed import ALWAYS, ROOT, affected

BREAKAGE = """
[[breakage]]
name = "one"
file = "unidist/algebra/mesh.py"
old = "a"
new = "b"
tests = ["tests/unit/test_planted.py::test_it[2]", "tests/unit/test_gone.py"]
what = "Something."
"""
FILES = {
    "ci/breakages/algebra.toml": BREAKAGE,
    "tests/unit/test_planted.py": "",
    "tests/unit/test_importing.py": "from unidist.algebra import (\n    layout,\n    mesh as m,\n)\n",
    "tests/support/helper.py": "from unidist.algebra.mesh import Mesh\n",
    "tests/parity/test_named.py": 'RUN = "tests.support.helper:run"\n',
    "tests/unit/test_other.py": "import unidist.array\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (
            "unidist/algebra/mesh.py",
            ["tests/parity/test_named.py", "tests/unit/test_importing.py", "tests/unit/test_planted.py::test_it[2]"],
        ),
        ("unidist/algebra/step.py", ["tests/unit/test_planted.py::test_it[2]"]),
        ("unidist/array/making.py", []),
        ("tests/support/helper.py", ["tests/parity/test_named.py"]),
        ("tests/unit/test_other.py", ["tests/unit/test_other.py"]),
    ],
)
def test_a_change_names_the_tests_that_it_can_break(changed: str, found: list[str], checkout: Path) -> None:
    assert affected([changed], checkout) == found


def test_a_file_that_runs_whole_names_no_case_of_its_own(checkout: Path) -> None:
    files = ["unidist/algebra/step.py", "tests/unit/test_planted.py"]
    assert affected(files, checkout) == ["tests/unit/test_planted.py"]


def test_checks_of_the_whole_package_always_run() -> None:
    assert affected([]) == sorted(ALWAYS)
    assert all((ROOT / name).exists() for name in ALWAYS)
    found = affected(["unidist/keras/torch/params/storage.py"])
    assert any(test.startswith("tests/keras/torch/test_zero.py") for test in found)
