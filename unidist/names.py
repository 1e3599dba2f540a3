"""The public names: which module each is in, and how one is loaded when it is first used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_HOME = {
    "unidist.session": "use backend initialize shutdown process_index process_count list_devices",
    "unidist.backends.registry": "backends register",
    "unidist.algebra": "Mesh Layout",
    "unidist.array": "DistributedArray distribute from_local all_reduce reduce_scatter all_gather all_to_all "
    "broadcast permute barrier",
    "unidist.planner.layout_map": "LayoutMap",
    "unidist.ledger": "ledger Ledger",
    "unidist.keras.strategies.strategy": "DataParallel ModelParallel",
    "unidist.keras.api.models": "parallelize describe gather_weights",
    "unidist.keras.checkpoint.api": "save restore",
    "unidist.keras.planning.plan": "plan",
    "unidist.keras.checkpoint.resuming": "Checkpoint",
    "unidist.keras.api.telemetry": "Telemetry",
    "unidist.keras.api.tensor_parallel": "TensorParallelKeras",
    "unidist.planner.plan": "Plan",
    "unidist.drawing": "draw Picture",
    "unidist.notebook": "notebook_run",
    "unidist.errors": "UnidistError BackendNotAvailableError BackendMismatchError MeshError LayoutError "
    "ArgumentError CapabilityError DesyncError ProcessLostError CheckpointError "
    "DrawingError RankFailedError",
}
WHERE = {name: module for module, names in _HOME.items() for name in names.split()}


def load(name: str) -> Any:
    """The object of a public name.

    Raises:
        AttributeError: there is no such name.
    """
    module = WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'unidist' has no attribute {name!r}")
    if module.startswith("unidist.keras."):
        # First and whole: where `use` came before Keras, the end of its import brings the hooks, which import the same
        # modules. Begun by one of them, it would find that one half made.
        importlib.import_module("keras")
    return getattr(importlib.import_module(module), name)


def shown(what: Any, form: str) -> str | None:
    """Returns what a notebook shows of an object, as "svg" or "html".

    A package above those that ask for it draws it.
    """
    found: str | None = getattr(importlib.import_module("unidist.drawing.page"), form)(what)
    return found


def fill(package: ModuleType, version: str) -> None:
    """Gives a module that stands for the package what `unidist/__init__.py` gives it."""

    def found(name: str) -> Any:
        value = load(name)
        setattr(package, name, value)
        return value

    vars(package).update(
        __version__=version,
        __all__=["__version__", *WHERE],
        __getattr__=found,
        __dir__=lambda: sorted(["__version__", *WHERE]),
    )
