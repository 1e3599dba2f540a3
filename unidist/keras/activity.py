"""Activity regularizers of the user's own, which may look at several rows of what their layer gives.

Keras calls one behind the layer's call, divides by the rows of the output, and adds the loss. Those of Keras's that sum
over the rows (L1, L2, L1L2) are linear in them, and are left alone. Any other may look at several rows, as a penalty on
the mean activation of a batch does (A. Ng, "Sparse autoencoder", 2011).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import keras

_LINEAR = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
# (the regularizer, the layer's output) -> the loss
_Look = TypeVar("_Look", bound=Callable[[Any, Any], Any])


def given(model: Any, look_of: Callable[[Any, str], _Look]) -> list[_Look]:
    """Lets activity regularizers of a model's layers be called through a function, where rows may mix.

    Args:
        look_of: (layer, name) -> the function; asked once for each layer.

    Returns:
        The functions.
    """
    found: list[_Look] = []
    for layer in model._flatten_layers():
        own = layer.activity_regularizer
        if own is None or type(own) in _LINEAR:
            continue
        if type(own) is not Looking:
            own = Looking(own, look_of(layer, f"activity regularizer of {layer.path or layer.name}"))
            object.__setattr__(layer, "activity_regularizer", own)
        found.append(own.look())
    return found


class Looking:
    """An activity regularizer that is called through a function.

    To all else it is the user's: Keras's saving asks for its class and its configuration.
    """

    __slots__ = ("_look", "_own")

    def __init__(self, own: Any, look: Callable[[Any, Any], Any]) -> None:
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_look", look)

    def __call__(self, output: Any) -> Any:
        return self._look(self._own, output)

    def look(self) -> Any:
        return self._look

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)

    def __eq__(self, other: object) -> bool:
        return bool(self._own == (other._own if type(other) is Looking else other))

    def __hash__(self) -> int:
        return hash(self._own)

    def __copy__(self) -> Any:
        return copy.copy(self._own)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._own.__reduce_ex__(protocol)
