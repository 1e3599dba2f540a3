"""What is known of a call is known of what it was called with: nothing else takes its place."""

from __future__ import annotations

from typing import Any

import keras

from unidist.keras.torch import changes


class Calling(keras.layers.Layer):
    """Its call does what a function of the user's does."""

    def call(self, x: Any) -> Any:
        return self.function(x)


def test_a_function_that_is_where_another_was_in_memory_is_another() -> None:
    layer = Calling()
    known = set()
    for place in range(100):
        layer.function = (lambda shift: lambda x: x + shift)(place)
        key = changes.key(layer)
        assert key == changes.key(layer)
        assert key not in known
        known.add(key)
