"""One device's losses are those that layers added, each once: Keras on JAX finds them by ids, which may be another's.

It keeps the ids of a trace until each layer is called again. A loss of the next trace that gets such an id is dropped,
or counted twice (3.15). Under a distribution unidist forgets them. What is compared with needs it as well.

Imported by what tests preload.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

_original = keras.layers.Layer.stateless_call


@functools.wraps(_original)
def _stateless_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    found = _original(self, *args, **kwargs)
    if keras.distribution.distribution() is None:
        for layer in self._flatten_layers():
            layer._loss_ids.clear()
    return found


keras.layers.Layer.stateless_call = _stateless_call
