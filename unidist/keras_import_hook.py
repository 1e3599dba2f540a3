"""Installs unidist's hooks when Keras or keras_hub arrives.

If one is imported already, that is now; else it is when its import ends.

Imports nothing of Keras, nor of what trains it: whoever chooses a backend must not bring them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Each with a name that it has at the end of its import.
_AWAITED = {"keras": "config", "keras_hub": "upload_preset"}


def _is_there(name: str) -> bool:
    return hasattr(sys.modules.get(name), _AWAITED[name])


def when_keras_arrives() -> None:
    """Calls unidist.keras.hooks.install() once Keras or keras_hub is imported. May be called again."""
    if _is_there("keras"):
        _install()
    if not all(map(_is_there, _AWAITED)) and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def finish() -> None:
    """Waits for what is still written in the background. A collective of its processes.

    Raises:
        CheckpointError: it could not be written.
    """
    if (later := sys.modules.get("unidist.keras.checkpoint.later")) is not None:
        later.leave()


def leave() -> None:
    """Puts back every attribute of Keras that unidist has replaced, and waits for Keras no more."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if (hooks := sys.modules.get("unidist.keras.hooks")) is not None:
        hooks.remove()


def _install() -> None:
    importlib.import_module("unidist.keras.hooks").install()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AWAITED:
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            # Who looks need not load: TensorFlow only asks whether there is a Keras.
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if self._finder in sys.meta_path and all(map(_is_there, _AWAITED)):
            sys.meta_path.remove(self._finder)
        _install()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
