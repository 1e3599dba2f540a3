#!/usr/bin/env python3
"""Which tests a change can break: `python3 ci/changed.py [REF]`; `python3 ci/test.py --changed [REF]` runs them.

Changed is what differs from REF (by default HEAD), files that git does not know included. For each file:

    of the package      the tests of the mistakes that ci/breakages plants in its folder, and the test files that
                        import it, by themselves or by their helpers
    of tests            itself, or the test files that import it or name it in a program
    a document          tests/docs

The few checks of the whole package always run. What only a whole run can show is left to a whole run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ci.mutants import breakages  # noqa: E402 - found by the line above

ALWAYS = (
    "tests/unit/test_structure.py",
    "tests/unit/test_breakages.py",
    "tests/unit/test_covered.py",
    "tests/unit/test_inside_keras.py",
    "tests/docs/test_prose.py",
)
_MODULE = re.compile(r"\b(?:unidist|tests|ci)(?:\.\w+)+")
_FROM = re.compile(r"\bfrom ((?:unidist|tests|ci)[\w.]*) import (\([^)]*\)|[^\n]+)")


def main(arguments: list[str]) -> int:
    print("\n".join(affected(changed(*arguments[:1]))))
    return 0


def changed(ref: str = "HEAD") -> list[str]:
    """Returns the files that differ from a commit, and those that git does not know."""
    differing = ("git", "diff", "--name-only", ref), ("git", "ls-files", "--others", "--exclude-standard")
    return [
        name
        for command in differing
        for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


def affected(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns tests, as pytest takes them, that the change of some files can break."""
    planted, users = _planted(root), _users(root)
    found = set(ALWAYS)
    for name in files:
        if name.startswith("unidist/"):
            near = [tests for file, tests in planted.items() if Path(file).parent == Path(name).parent]
            found = found.union(*near)
        if name.endswith(".md"):
            found.add("tests/docs")
        found |= _reached(name, users)
    there = {test for test in found if (root / test.partition("::")[0]).exists()}
    return sorted(test for test in there if not there & ({test.partition(end)[0] for end in ("::", "[")} - {test}))


def _planted(root: Path) -> dict[str, set[str]]:
    """File of the package -> the tests of the mistakes that are planted in it."""
    found: dict[str, set[str]] = defaultdict(set)
    for one in breakages(root / "ci" / "breakages"):
        found[one.file].update(one.tests)
    return found


def _users(root: Path) -> dict[str, set[str]]:
    """File -> the files of tests that import it, or name its module in a text."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / "tests").rglob("*.py")):
        for module in _named(path.read_text()):
            found[module.replace(".", "/") + ".py"].add(path.relative_to(root).as_posix())
    return found


def _named(text: str) -> set[str]:
    """Modules that a file imports or names."""
    modules = set(_MODULE.findall(text))
    for package, names in _FROM.findall(text):
        modules |= {f"{package}.{name}" for name in re.findall(r"\w+", names)}
    return modules | {module.rpartition(".")[0] for module in modules}


def _reached(name: str, users: Mapping[str, set[str]]) -> set[str]:
    """Returns a file, if it has tests, and the test files that use it, by helpers between them."""
    seen, waiting = {name}, [name]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return {file for file in seen if Path(file).name.startswith("test_")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
