"""Knows what treats each row of a batch alone: layers and functions of Keras's and keras_hub's."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from unidist.keras.layers import computes_as
from unidist.keras.patching.compat import INSIDE, Functional, TorchModuleWrapper, is_float_dtype

# Whose routing loss is of all tokens.
_MIXTURES = ("qwen_moe", "mixtral", "qwen3_moe", "qwen3_5_moe")
# What of Keras's and keras_hub's looks at several rows: what mixes or equalizes images, the likeness of each row to all
# others, codebooks that follow what they are given.
_MIXING = frozenset(
    [
        *("MixUp", "CutMix", "Equalization", "CLIPHead", "SigLIPHead", "MetaCLIP2Head"),
        *("VectorQuantizerEMA", "ResidualVectorQuantizer"),
    ]
)
# A layer is looked at by itself; the others are given weights, an activity regularizer the output (activity.py).
_NOT_OF_ROWS = (
    *(keras.layers.Layer, keras.initializers.Initializer),
    *(keras.regularizers.Regularizer, keras.constraints.Constraint),
)
# The dims of a stack of kernels: which one, its inputs, its outputs.
_STACKED = 3
# Functions that torch lets stand before and behind a module's call.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Of a layer's methods those that its call uses for nothing.
_NOT_CALLED = frozenset(
    [
        *("build", "get_config", "from_config", "get_build_config", "build_from_config", "add_weight"),
        *("compute_output_shape", "compute_output_spec", "compute_mask", "quantize", "enable_lora"),
        *("save_own_variables", "load_own_variables", "save_assets", "load_assets", "count_params"),
    ]
)


def is_container(layer: Any) -> bool:
    """Returns whether its call only passes on what its layers give."""
    kinds = Functional, keras.Sequential
    return isinstance(layer, kinds) and type(layer).call in [kind.call for kind in kinds]


def operations_of(layer: Any) -> Iterator[Any]:
    inner = layer if isinstance(layer, Functional) else getattr(layer, "_functional", None)
    for op in inner.operations if inner is not None else ():
        if not isinstance(op, keras.layers.Layer):
            yield op


def is_of_keras(thing: Any) -> bool:
    """Returns whether a function or a class is defined in Keras itself. Keras's own tests are users."""
    home = str(getattr(thing, "__module__", ""))
    return home.startswith(INSIDE) and not home.startswith(f"{INSIDE}testing.")


def overrides(thing: Any, method: str) -> bool:
    """Returns whether a class of the user's, and not of Keras, defines a method of an object."""
    return not is_of_keras(next(kind for kind in type(thing).__mro__ if method in vars(kind)))


def is_known(layer: Any) -> bool:
    """Returns whether a layer is known to treat each row alone, or to ask for the others itself.

    BatchNormalization asks.
    """
    home = type(layer).call.__module__
    if not (is_of_keras(type(layer).call) or home.startswith("keras_hub.")) or any(
        f".{name}." in home for name in _MIXTURES
    ):
        return False
    if any(kind.__name__ in _MIXING and is_of_either(kind) for kind in type(layer).__mro__):
        return False
    if isinstance(layer, (keras.layers.Lambda, TorchModuleWrapper)) or _is_given_functions(layer):
        return False
    if _overrides_helpers(type(layer)):
        return False
    if overwritten(layer):
        return False
    axis = getattr(layer, "axis", None)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return 0 not in axes or isinstance(layer, keras.layers.BatchNormalization)


def overwritten(layer: Any) -> list[Any]:
    """Returns a layer's own variables whose gradient is the next value, as float8 quantization makes.

    They are scales of the whole batch.
    """
    return [v for v in getattr(layer, "_trainable_variables", ()) if getattr(v, "overwrite_with_gradient", False)]


def stack_of(layer: Any) -> list[Any]:
    """Returns the layer's own weights that are stacked along their first dim, as kernels of experts.

    There are none in a class of Keras's, and none where kernels of three dims or more have other first dims.

    Example:
        >>> import keras
        >>> class Experts(keras.layers.Layer):
        ...     def build(self, shape):
        ...         self.kernel = self.add_weight(shape=(4, shape[-1], 8))
        ...         self.bias = self.add_weight(shape=(4, 8))
        ...         self.scale = self.add_weight(shape=(8,))
        >>> layer = Experts()
        >>> layer.build((None, 16))
        >>> [tuple(weight.shape) for weight in stack_of(layer)]
        [(4, 16, 8), (4, 8)]
    """
    if is_of_keras(type(layer)) or computes_as(layer) is not None:
        return []
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    sizes = {v.shape[0] for v in own if len(v.shape) >= _STACKED}
    return [v for v in own if len(v.shape) > 1 and v.shape[0] in sizes] if len(sizes) == 1 else []


def runs_only_keras(operation: Any, given: Iterable[Any] = ()) -> bool:
    """Returns whether a call of a layer, or of a graph's operation, runs no code of the user's.

    It is `given` these values. Code of layers inside of it is left aside.
    """
    own = vars(operation).get("call")
    if own is not None and getattr(inspect.unwrap(own), "__func__", None) is not type(operation).call:
        return False
    hooks = [hook for name in _HOOKS for hook in vars(operation).get(name, {}).values()]
    if not all(map(_is_safe, hooks)) or not is_of_either(_home(type(operation), "__call__")):
        return False
    if isinstance(operation, keras.layers.Layer):
        return is_container(operation) or is_known(operation)
    functions = [value for name, value in vars(operation).items() if name != "call"]
    return is_of_either(type(operation)) and all(_is_safe(f) for f in (*functions, *given) if callable(f))


def keeps_numbers(layer: Any) -> bool:
    """Returns whether a layer of the user's keeps numbers of what it is given: metrics, or untrained ones.

    Of slices it would keep other ones. State for each feature shows by its shape where features are cut.
    """
    if is_container(layer) or is_known(layer):
        return False
    numbers = [v for v in layer._non_trainable_variables if not v.shape and is_float_dtype(v.dtype)]
    return bool(numbers or layer._metrics)


def _overrides_helpers(kind: type) -> bool:
    """Returns whether a class of the user's overrides a method that the call of Keras's may use."""
    users = list(itertools.takewhile(lambda one: not is_of_either(one), kind.__mro__))
    given = kind.__mro__[len(users)]
    return any(
        callable(value) and not name.startswith("__") and name not in _NOT_CALLED and hasattr(given, name)
        for one in users
        for name, value in vars(one).items()
    )


def _home(kind: type, method: str) -> type:
    return next(one for one in kind.__mro__ if method in vars(one))


def is_of_either(kind: type) -> bool:
    return is_of_keras(kind) or kind.__module__.startswith("keras_hub.")


def _is_given_functions(layer: Any) -> bool:
    # LSTM and GRU give the functions of their cell to a loop of the backend's.
    cell = getattr(layer, "cell", None)
    owners = [layer, cell] if isinstance(cell, keras.layers.Layer) else [layer]
    return any(
        callable(value) and name != "call" and not name.startswith("_") and not _is_safe(value)
        for owner in owners
        for name, value in vars(owner).items()
    )


def _is_safe(function: Any) -> bool:
    """Returns whether a function treats each row alone, or is given no rows."""
    if isinstance(function, _NOT_OF_ROWS):
        return True
    home = str(getattr(function, "__module__", None) or type(function).__module__)
    return home.startswith((INSIDE, "keras_hub.", "unidist.keras."))
