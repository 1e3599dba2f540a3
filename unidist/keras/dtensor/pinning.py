"""Results that DTensor must not lay as it likes: what is joined of parts is whole along the dim that joins them.

DTensor (TensorFlow 2.21) lets the layout that a consumer wants of a concatenation spread to it. Where that cuts the dim
of the parts, each device joins its own pieces, which is another order: wrong numbers, without an error.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.dtensor.python.layout import MATCH
from tensorflow.experimental import dtensor
from tensorflow.python.ops import gen_array_ops

from unidist.keras.dtensor import slicing
from unidist.keras.interception import around


def install() -> None:
    """Wraps the op behind tf.concat, keras.ops.concatenate and the gradient of a split."""
    around(gen_array_ops, "concat_v2", _concatenating)


def _concatenating(original: Any) -> Any:
    @functools.wraps(original)
    def concat_v2(values: Any, axis: Any, name: Any = None) -> Any:
        found = original(values, axis, name)
        mesh = slicing.mesh_here()
        # Shapes are joined too: DTensor must go on seeing constants in them.
        if mesh is None or tf.executing_eagerly() or not found.shape.rank or _is_shape(found):
            return found
        first = dtensor.UNSHARDED if tf.get_static_value(axis) in (None, 0, -found.shape.rank) else MATCH
        return dtensor.relayout(found, dtensor.Layout([first] + [dtensor.UNSHARDED] * (found.shape.rank - 1), mesh))

    return concat_v2


def _is_shape(tensor: Any) -> bool:
    return bool(tensor.shape.rank == 1 and tensor.dtype.is_integer)
