"""Cases that run with `--all` alone, since others cover them: ci/covered.toml names both.

What is left out is left out by its name, never by a rule, so that nothing that is new is left out. Where tests are
named one by one (`pytest FILE::TEST`), all of those run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ci.mutants import breakages

REGISTER = Path(__file__).parents[2] / "ci" / "covered.toml"


@dataclass(frozen=True)
class Covered:
    """Some cases of one test, or all of it. A table of the register may name several tests of the same cases.

    Attributes:
        test: its file and name.
        cases: what pytest has in brackets behind it; none: the test itself.
        by: the cases, or tests, that notice what these would.
        why: they do.
    """

    test: str
    cases: tuple[str, ...]
    by: tuple[str, ...]
    why: str

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"{self.test}[{case}]" for case in self.cases) or (self.test,)


@cache
def register() -> tuple[Covered, ...]:
    tables = tomllib.loads(REGISTER.read_text())["covered"]
    return tuple(
        Covered(test, tuple(t["cases"]), tuple(t["by"]), t["why"])
        for t in tables
        for test in t.get("tests", [t.get("test")])
    )


@cache
def left_out() -> frozenset[str]:
    """The ids of all cases that others cover."""
    return frozenset(name for one in register() for name in one.ids)


@cache
def planted() -> frozenset[str]:
    """The ids of the tests that notice the mistakes of ci/breakages."""
    return frozenset(name for one in breakages() for name in one.tests)


def unknown(collected: Iterable[str], whole: Collection[str]) -> list[str]:
    """The ids that ci names and that are not there, of files that were collected whole."""
    found = set(collected)
    for name in collected:
        parts = name.partition("[")[0].split("::")
        found |= {"::".join(parts[:length]) for length in range(1, len(parts) + 1)}
    named = {*planted(), *(name for one in register() for name in (*one.ids, *one.by))}
    return sorted(name for name in named if name.partition("::")[0] in whole and name not in found)
