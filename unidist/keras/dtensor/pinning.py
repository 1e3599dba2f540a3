"""Results that DTensor must not lay as it likes: what is joined of parts or padded is whole along that dim.

DTensor (TensorFlow 2.21) lets the layout that a consumer wants of such a result spread to it. Where that cuts the dim
of the parts, each device joins its own pieces, which is another order: wrong numbers, without an error. So it is with
the zeros that the gradient of a slice is padded with.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.dtensor.python.layout import MATCH
from tensorflow.experimental import dtensor
from tensorflow.python.ops import gen_array_ops

from unidist.keras.compat import tensorflow_numpy
from unidist.keras.dtensor import slicing, values
from unidist.keras.dtensor.values import U
from unidist.keras.interception import Hook


def hooks() -> tuple[Hook, ...]:
    """The ops behind tf.concat and tf.pad, and so keras.ops.concatenate and gradients of splits and slices, and that
    behind tf.unstack, by which recurrent layers take their steps: of shards DTensor refuses it."""
    whole = "what is joined or padded is whole along that dim"
    return (
        Hook(gen_array_ops, "concat_v2", _concatenating, whole),
        Hook(gen_array_ops, "pad", _padding, whole),
        Hook(gen_array_ops, "pad_v2", _padding, whole),
        Hook(tensorflow_numpy, "take", _looking_up, "rows of a table that is cut by its ids are whole"),
        Hook(gen_array_ops, "unpack", _unpacking, "steps of a sequence are whole"),
    )


def _concatenating(original: Any) -> Any:
    @functools.wraps(original)
    def concat_v2(values: Any, axis: Any, name: Any = None) -> Any:
        found = original(values, axis, name)
        return _pinned(found, tf.get_static_value(axis) not in (None, 0, -(found.shape.rank or 0)))

    return concat_v2


def _padding(original: Any) -> Any:
    @functools.wraps(original)
    def pad(input: Any, paddings: Any, *args: Any, **kwargs: Any) -> Any:
        known = tf.get_static_value(paddings)
        keeps_rows = known is not None and len(known) > 0 and not any(known[0])
        found = original(_pinned(tf.convert_to_tensor(input), keeps_rows), paddings, *args, **kwargs)
        return _pinned(found, keeps_rows)

    return pad


def _looking_up(original: Any) -> Any:
    """Keras's take. Of a table that is cut by its ids each device has whole rows: DTensor fails where the layer behind
    it wants them cut."""

    @functools.wraps(original)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        found = original(x, indices, axis=axis)
        table = getattr(x, "_value", None)
        if axis != 0 or not isinstance(table, values.SpreadVariable) or not isinstance(found, tf.Tensor):
            return found
        is_cut = (table.compute or table.layout).sharding_specs[:1] not in ([], [U])
        return _pinned(found, True) if is_cut else found

    return take


def _unpacking(original: Any) -> Any:
    @functools.wraps(original)
    def unpack(value: Any, num: int, axis: int = 0, name: Any = None) -> Any:
        # Rows stand first, and second behind the steps of a sequence.
        found = original(_pinned(tf.convert_to_tensor(value), True, rows=int(axis == 0)), num, axis, name)
        return [_pinned(part, True) for part in found]

    return unpack


def _pinned(x: Any, keeps_rows: bool, rows: int = 0) -> Any:
    """A tensor of a program, and its gradient, whole along all dims, but for that of its rows where these stay as they
    are."""
    mesh = slicing.mesh_here()
    # Shapes and paddings are joined too: DTensor must go on seeing constants in them.
    if mesh is None or tf.executing_eagerly() or not x.shape.rank or x.dtype.is_integer:
        return x
    dims = [dtensor.UNSHARDED] * x.shape.rank
    if keeps_rows and rows < len(dims):
        dims[rows] = MATCH
    layout = dtensor.Layout(dims, mesh)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def pin(value: Any) -> tuple[Any, Any]:
        return dtensor.relayout(value, layout), lambda gradient: dtensor.relayout(gradient, layout)

    return pin(x)
