"""Reads files of models that Keras wrote on another backend: with `compile` as this one would have it.

Keras 3.15 names its own optimizers on torch by the module of torch's variant, which no other backend can run, and
writes down whether "auto" meant to compile: True on JAX, where it costs nothing, and False on torch.
"""

from __future__ import annotations

from typing import Any

import keras

from unidist.keras.patching.compat import TORCH_OPTIMIZERS, Trainer
from unidist.keras.patching.patches import Hook, calling


def hooks() -> tuple[Hook, ...]:
    return (Hook(Trainer, "compile_from_config", _compiling, "files that another Keras backend wrote"),)


@calling
def _compiling(original: Any, self: Any, config: Any) -> Any:
    return original(self, as_of_here(config, keras.config.backend()))


def as_of_here(config: Any, backend: str) -> Any:
    """Returns the same config where it was written on the same side of torch.

    Else it has optimizers by their public names and `jit_compile="auto"`.

    A file does not say which backend wrote it: it was torch if it names an optimizer of torch's. One with an optimizer
    of which Keras has no variant for torch looks like JAX's, so that torch takes its `jit_compile` for "auto" too.
    """
    if not isinstance(config, dict) or _is_of_torch(config) == (backend == "torch"):
        return config
    moved = _renamed(config)
    return {**moved, "jit_compile": "auto"} if "jit_compile" in moved else moved


def _is_of_torch(config: Any) -> bool:
    if isinstance(config, dict):
        return str(config.get("module", "")).startswith(TORCH_OPTIMIZERS) or any(map(_is_of_torch, config.values()))
    return isinstance(config, list) and any(map(_is_of_torch, config))


def _renamed(config: Any) -> Any:
    if isinstance(config, list):
        return [_renamed(item) for item in config]
    if not isinstance(config, dict):
        return config
    inner = {key: _renamed(value) for key, value in config.items()}
    if str(inner.get("module", "")).startswith(TORCH_OPTIMIZERS):
        inner |= {"module": "keras.optimizers", "registered_name": None}
    return inner
