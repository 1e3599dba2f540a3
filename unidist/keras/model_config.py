"""A model's config as JSON, and the model that Keras makes of it."""

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
from unidist.keras.patching.compat import saving_lib, serialization_lib
from unidist.keras.patching.patches import Hook, Table, by


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
