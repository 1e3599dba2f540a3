"""Compares versions of what is installed with the ranges in the installed package's metadata.

Imports none of it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidist import namesake
from unidist.backends import registry
from unidist.doctor.check import Check, Question

PACKAGE = "keras-unidist"
_ALWAYS = ("numpy", "keras", "keras-hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Holds what the package's metadata asks for.

    Attributes:
        python: of Python, as ">=3.11".
        requires: requirements as the metadata spells them, as 'torch>=2.13; extra == "torch"'.
    """

    python: str
    requires: Sequence[str]


def _told() -> tuple[str, ...]:
    return (*_ALWAYS, *registry.distributions())


def installed() -> dict[str, str]:
    """Name -> version of Python, of this package and of what it works with, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in (PACKAGE, *_told()):
        if (version := registry.version_of(name)) is not None:
            found[name] = version
    return found


def ranges() -> Ranges | None:
    """Returns what the installed package asks for; None where it is not installed.

    It may be a source folder on the path.
    """
    try:
        python = importlib.metadata.metadata(PACKAGE)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return None
    return Ranges(python=python or "", requires=importlib.metadata.requires(PACKAGE) or ())


def beside(folder: Path) -> list[Check]:
    """Returns a failed check if another package of this name is installed into the same folder; else none."""
    if (version := namesake.version_beside(folder)) is None:
        return []
    asked, found = "no other package has this one's name", f"modin's unidist {version} in {folder}: files are mixed"
    return [Question("unidist", asked).failed(found, namesake.REMEDY)]


def check(found: Mapping[str, str], asked: Ranges | None) -> list[Check]:
    """One check for Python, one for this package, and one for each distribution it works with."""
    if asked is None:
        why = "not installed, but imported from a folder: its ranges of versions are unknown"
        advice = "install it from its checkout: pip install -e FOLDER"
        others = {name: found.get(name, "not installed") for name in ("python", *_told())}
        return [
            Question(PACKAGE, "it is installed").not_checked(why, advice),
            *(Question(name, "its version is within the range").not_checked(text) for name, text in others.items()),
        ]
    within = _within()
    wanted = _by_name(asked.requires) if within else {}
    checks = [_one("python", found.get("python"), asked.python, within)]
    checks.append(Question(PACKAGE, "it is installed").ok(found.get(PACKAGE, "?")))
    checks += beside(Path(namesake.__file__).parents[1])
    return [*checks, *(_one(name, found.get(name), wanted.get(name, ""), within) for name in _told())]


def _one(name: str, version: str | None, range_: str, within: Callable[[str, str], bool] | None) -> Check:
    question = Question(name, f"its version is within {range_}" if range_ else "its version is known")
    install = f'pip install "{name}{range_}"'
    if version is None:
        return question.not_checked(
            "not installed", f"where you need it: {registry.distributions().get(name) or install}"
        )
    if within is None:
        found = f"{version}; the package `packaging`, which compares versions, is not installed"
        return question.not_checked(found, "pip install packaging")
    if range_ and not within(version, range_):
        return question.failed(version, "use another Python" if name == "python" else install)
    if registry.is_newer(version, tested := registry.tested(name)):
        found = f"{version}, and unidist was tested with {', '.join(tested)}"
        advice = "use it where Keras on its backends is ok below; else install one of these"
        return Question(name, "unidist was tested with its version").warning(found, advice)
    return question.ok(f"{version} ({range_})" if range_ else version)


def _within() -> Callable[[str, str], bool] | None:
    if importlib.util.find_spec("packaging") is None:
        return None
    from packaging.specifiers import SpecifierSet

    # Nightly and release-candidate builds count by their numbers.
    return lambda version, range_: SpecifierSet(range_).contains(version, prereleases=True)


def _by_name(requires: Sequence[str]) -> dict[str, str]:
    from packaging.requirements import InvalidRequirement, Requirement

    found: dict[str, str] = {}
    for text in requires:
        with contextlib.suppress(InvalidRequirement):  # another package's business, as a URL
            requirement = Requirement(text)
            parts = {*filter(None, found.get(requirement.name, "").split(",")), *map(str, requirement.specifier)}
            found[requirement.name] = ",".join(sorted(parts, reverse=True))
    return found
