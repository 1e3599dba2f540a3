"""A model's config as JSON, and the model that Keras makes of it.

Files that another Keras backend wrote have `compile` as that one would have it. Keras 3.15 names its own optimizers on
torch by the module of torch's variant, which no other backend can run, and writes down whether "auto" meant to compile:
True on JAX, where it costs nothing, and False on torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras

from unidist.checkpoint.manifest import MANIFEST
from unidist.checkpoint.tensors import parse_json
from unidist.keras.patching.compat import TORCH_OPTIMIZERS, Trainer, saving_lib, serialization_lib
from unidist.keras.patching.patches import Hook, Table, by, calling


def config_of(model: Any) -> str:
    """Returns JSON from which Keras makes the model again, compiled as it is.

    Raises what classes raise that do not say how.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        >>> model_of(config_of(model), is_compiled=False).layers[0].units
        3
    """
    with without_tensorflow(), saving_lib.ObjectSharingScope():
        return json.dumps(keras.saving.serialize_keras_object(model), allow_nan=False)


def model_of(text: str, *, is_compiled: bool) -> Any:
    """Makes the model of a config that anybody may have written.

    Raises what classes raise that are not known or are called with other arguments.

    Args:
        is_compiled: with optimizer, loss and metrics, if there were any.
    """
    config = parse_json(text.encode(), MANIFEST)
    if not is_compiled and isinstance(config, dict):
        config.pop("compile_config", None)
    with without_tensorflow(), saving_lib.ObjectSharingScope():
        model = keras.saving.deserialize_keras_object(config, safe_mode=True)
    if not isinstance(model, keras.Model) or not model.built:
        raise TypeError("it is of no built model")
    return model


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Keras imports TensorFlow to look whether a value is one of its types: seconds, and half a GB."""
    stands_in = SimpleNamespace(available=False)
    hooks = [] if "tensorflow" in sys.modules else [Hook(serialization_lib, "tf", by(stands_in), "it is not imported")]
    table = Table(hooks)
    table.turn_on()
    try:
        yield
    finally:
        table.turn_off()


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
