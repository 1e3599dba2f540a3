"""Layers, read once for planning and for training: which of Keras's a layer computes as."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from unidist.keras.patching.compat import BaseConv

# What a layer of each class computes by. A subclass that has another of these may do anything.
_DENSE = ("call", "__call__", "kernel")
_TABLE = ("call", "__call__", "embeddings", "compute_mask")
COMPUTING: dict[type, tuple[str, ...]] = {
    keras.layers.Dense: _DENSE,
    keras.layers.EinsumDense: _DENSE,
    keras.layers.Embedding: _TABLE,
    keras.layers.ReversibleEmbedding: _TABLE,
    BaseConv: _DENSE,
}


def computes_as(layer: Any) -> type | None:
    """Returns the class of Keras's by whose call and kernel a layer computes: its own or an inherited one.

    None where it is no other, or computes in a way of its own.

    Example:
        >>> import keras
        >>> class Named(keras.layers.Dense):
        ...     def get_config(self):
        ...         return {**super().get_config(), "note": ""}
        >>> class Doubled(keras.layers.Dense):
        ...     def call(self, x):
        ...         return 2 * super().call(x)
        >>> computes_as(Named(1)).__name__, computes_as(Doubled(1))
        ('Dense', None)
    """
    for base in type(layer).__mro__:
        if (names := COMPUTING.get(base)) is not None:
            return base if all(_defined(type(layer), name) is _defined(base, name) for name in names) else None
    return None


def _defined(owner: type, name: str) -> Any:
    return inspect.getattr_static(owner, name, None)


def has_more_than_its_kernel(layer: Any) -> bool:
    """Returns whether it computes with more than its kernel now: with low-rank or quantized ones."""
    return bool(more_than_its_kernel(layer))


def keeps_to_its_kernel(layer: Any) -> bool:
    """Returns whether all that it computes with goes along a cut of its kernel.

    Low-rank kernels (LoRA) do, and the scales of a kernel in int8 or float8. Others pack the kernel, or group its dims.
    """
    return getattr(layer, "quantization_mode", None) in (None, "int8", "float8")


def more_than_its_kernel(layer: Any) -> str:
    """Returns how it computes otherwise than with its kernel alone now; "" where it does not.

    Example:
        >>> import keras
        >>> layer = keras.layers.Dense(4)
        >>> layer.build((None, 8))
        >>> layer.enable_lora(2)
        >>> more_than_its_kernel(layer)
        'has low-rank kernels (LoRA)'
    """
    if getattr(layer, "lora_enabled", False):
        return "has low-rank kernels (LoRA)"
    mode = getattr(layer, "quantization_mode", None)
    return f"computes with a quantized kernel ({mode})" if mode else ""


def own_call(layer: Any) -> str:
    """Returns the class of Keras's that it inherits from and does not compute as; "" where there is none.

    Such classes are Keras's products and look-ups.
    """
    if computes_as(layer) is not None:
        return ""
    return next((base.__name__ for base in type(layer).__mro__ if base in COMPUTING and base is not BaseConv), "")


def children(layer: Any) -> list[Any]:
    """The layers directly inside a layer, each once."""
    return list({id(x): x for x in layer._flatten_layers(include_self=False, recursive=False)}.values())
