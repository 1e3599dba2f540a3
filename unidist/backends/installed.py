"""Versions of what is installed, from its metadata. Imports none of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from itertools import chain


def version_of(distribution: str) -> str | None:
    """The version of a distribution, or of the one that installs a module of that name."""
    homes = chain((distribution,), _installing(distribution))
    for home in filter(None, homes):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(home)
    return None


def _installing(module: str) -> Iterator[str]:
    # A generator: reading what every distribution installs takes long, and is seldom needed.
    yield from importlib.metadata.packages_distributions().get(module, ())


def is_newer(version: str, tested: Sequence[str]) -> bool:
    """Returns whether a version is newer than all that were tested. Patches of a tested one are not.

    Example:
        >>> from unidist.backends.installed import is_newer
        >>> is_newer("2.15.1+cu130", ("2.13", "2.15")), is_newer("2.16.0", ("2.13", "2.15")), is_newer("1.0", ())
        (False, True, False)
    """
    return bool(tested) and _minor(version) > max(map(_minor, tested))


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
