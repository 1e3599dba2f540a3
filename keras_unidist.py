"""unidist by a name that nobody else has: `import keras_unidist as unidist`.

Another package installs a folder called unidist, and may have overwritten what `import unidist` loads. This module
loads the names by themselves.

Example:
    >>> import keras_unidist as unidist
    >>> unidist.Mesh({"data": 2}).size
    2
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).resolve().parent / "unidist"


def _package() -> ModuleType:
    """The package `unidist`, as it would be if it were alone.

    Raises:
        ImportError: the other package is imported already.
    """
    found = sys.modules.get("unidist")
    if found is None and _is_ours():
        found = importlib.import_module("unidist")
    if found is None:
        spec = ModuleSpec("unidist", None, is_package=True)
        spec.submodule_search_locations = [str(_FOLDER)]
        found = sys.modules["unidist"] = importlib.util.module_from_spec(spec)
        names = importlib.import_module("unidist.names")
        names.fill(found, importlib.metadata.version("keras-unidist"))
        importlib.import_module("unidist.namesake").warn(_FOLDER.parent)
    elif "DataParallel" not in getattr(found, "__all__", ()):
        raise ImportError(
            "modin's unidist is imported already: import keras_unidist before it, in a process of its own"
        )
    return found


def _is_ours() -> bool:
    path = _FOLDER / "__init__.py"
    return path.exists() and "from unidist.names import" in path.read_text(encoding="utf-8")


_unidist = _package()
__version__ = _unidist.__version__
__all__ = _unidist.__all__


def __getattr__(name: str) -> Any:
    return getattr(_unidist, name)


def __dir__() -> list[str]:
    return dir(_unidist)
