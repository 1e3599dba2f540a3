"""The protocol, the registry, and one adapter a framework.

`unidist.backends()` lists what is installed.
Importing this package makes `unidist.backends` name it: so it is callable.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = importlib.import_module("unidist.backends.registry").backends()
        return found


sys.modules[__name__].__class__ = _CallablePackage
