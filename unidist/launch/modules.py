"""Says whether a module can be run as `python -m` would, without importing any of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path


def missing(module: str) -> str:
    """Returns why `python -m` would find no such module from here.

    It is "" where there is one, or where that does not show.
    """
    path = [str(Path.cwd()), *sys.path]
    package: list[str] | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = _found(name, path if package is None else package)
        if found is None:
            return f"no such module: {name!r}"
        if found.submodule_search_locations is None:
            return ""  # Also with parts behind it: os is no package, and there is os.path.
        # Code of a package may look in several folders for its parts, as pkgutil.extend_path does.
        folders = [str(Path(entry, *parts[:count])) for entry in path]
        package = [*found.submodule_search_locations, *folders]
    if package is not None and _found(f"{module}.__main__", package) is None:
        return f"{module!r} is a package without a __main__.py, which -m would run"
    return ""


def _found(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Asks all of Python's finders: packages that are installed from a folder have their own."""
    for finder in sys.meta_path:
        if (found := finder.find_spec(name, path)) is not None:
            return found
    return None
