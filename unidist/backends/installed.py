"""Versions of what is installed, from its metadata. Imports none of it.

Beside them is the command that installs an extra. It never names the package itself: that is on no index, where a
stranger could take its name.
"""

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


# As pyproject.toml has them, which a test compares; without its tools of development.
_KERAS = "keras>=3.15,<3.17"
EXTRAS = {
    "torch": (_KERAS, "torch>=2.13"),
    "jax": (_KERAS, "jax>=0.10"),
    "tensorflow": (_KERAS, "tensorflow>=2.21"),
    "horovod": (_KERAS, "horovod>=0.28.1"),
    "remote": ("fsspec>=2024.6",),
    "demo": ("scikit-learn>=1.5",),
}


def install(extra: str) -> str:
    """The command that installs what an extra does.

    Example:
        >>> install("jax")
        'pip install "keras>=3.15,<3.17" "jax>=0.10"'
    """
    return " ".join(("pip install", *(f'"{requirement}"' for requirement in EXTRAS[extra])))
