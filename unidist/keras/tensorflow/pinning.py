"""Pins results that DTensor must not lay as it likes: joined or padded ones are whole along that dim.

DTensor (TensorFlow 2.21) lets the layout that a consumer wants of such a result spread to it. Where that cuts the dim
of the parts, each device joins its own pieces, which is another order: wrong numbers, without an error. So it is with
the zeros that the gradient of a slice is padded with.

Random numbers are drawn whole by every device, so that they are one device's: each draws others for its own part of a
result that a consumer cuts.

Recurrent layers are traced step by step: DTensor cannot partition lists of tensors in loops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.dtensor.python.layout import MATCH
from tensorflow.experimental import dtensor
from tensorflow.python.ops import gen_array_ops, gen_nn_ops

from unidist.keras.needs import draws
from unidist.keras.patching.compat import RNN, tensorflow_math, tensorflow_numpy
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.tensorflow import slicing, values
from unidist.keras.tensorflow.values import U

# Keras's functions of segments, whose gradients are look-ups.
_OF_SEGMENTS = ("segment_sum", "segment_max", "segment_min", "segment_prod")
# The second ones are transposed convolutions.
_CONVOLUTIONS = ("conv2d", "conv3d", "conv2d_backprop_input", "conv3d_backprop_input_v2")
_DRAWING = "tensorflow.python.ops.gen_stateless_random_ops_v2:"
_DRAWN = (
    *("stateless_random_normal_v2", "stateless_truncated_normal_v2", "stateless_random_uniform_v2"),
    *("stateless_random_uniform_int_v2", "stateless_random_uniform_full_int_v2"),
)


def hooks() -> tuple[Hook, ...]:
    """Hooks into the ops behind tf.concat, tf.pad and tf.unstack.

    So keras.ops.concatenate and gradients of splits and slices are covered. By tf.unstack recurrent layers take their
    steps: of shards DTensor refuses it.
    """
    whole = "what is joined or padded is whole along that dim"
    return (
        Hook(gen_array_ops, "concat_v2", _concatenating, whole),
        Hook(gen_array_ops, "pad", _padding, whole),
        Hook(gen_array_ops, "pad_v2", _padding, whole),
        Hook(tensorflow_numpy, "take", _looking_up, "rows of a table that is cut by its ids are whole"),
        *(Hook(tensorflow_math, name, _of_segments, "gradients of segments are whole") for name in _OF_SEGMENTS),
        Hook(tf.linalg, "cholesky", _of_matrices, "matrices are whole"),
        Hook(tf, "tile", _tiling, "what is repeated is whole along these dims"),
        Hook(gen_nn_ops, "top_kv2", _sorting, "what is sorted is whole along that dim"),
        Hook(tensorflow_numpy, "take_along_axis", _taking_along, "what is taken along an axis is whole"),
        Hook(gen_array_ops, "unpack", _unpacking, "steps of a sequence are whole"),
        *(Hook(gen_nn_ops, name, _convolving, "gradients of convolutions are laid as these") for name in _CONVOLUTIONS),
        *(Hook(_DRAWING, name, _drawing, "random numbers are one device's", needed=draws) for name in _DRAWN),
        Hook(RNN, "inner_loop", _looping, "masks of sequences that are read backwards"),
    )


@calling
def _concatenating(original: Any, values: Any, axis: Any, name: Any = None) -> Any:
    found = original(values, axis, name)
    return _pinned(found, tf.get_static_value(axis) not in (None, 0, -(found.shape.rank or 0)))


@calling
def _padding(original: Any, input: Any, paddings: Any, *args: Any, **kwargs: Any) -> Any:
    if slicing.mesh_here() is None:
        return original(input, paddings, *args, **kwargs)
    # In a list that Keras gives one number may be a tensor.
    known = tf.get_static_value(tf.convert_to_tensor(paddings))
    keeps_rows = known is not None and len(known) > 0 and not any(known[0])
    found = original(_pinned(tf.convert_to_tensor(input), keeps_rows), paddings, *args, **kwargs)
    return _pinned(found, keeps_rows)


@calling
def _looking_up(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
    """Wraps Keras's take, so that each device has whole rows of a table that is cut by its ids.

    So it is with what is computed. DTensor fails where the layer behind it wants them cut.
    """
    found = original(x, indices, axis=axis)
    table = getattr(x, "_value", None)
    if axis != 0 or not isinstance(found, tf.Tensor):
        return found
    cuts = (table.compute or table.layout).sharding_specs if isinstance(table, values.SpreadVariable) else None
    return found if cuts is not None and cuts[:1] in ([], [U]) else _pinned(found, True)


@calling
def _tiling(original: Any, input: Any, multiples: Any, name: Any = None) -> Any:
    if slicing.mesh_here() is None:
        return original(input, multiples, name)
    times = tf.get_static_value(tf.convert_to_tensor(multiples))
    keeps_rows = times is not None and len(times) > 0 and times[0] == 1
    return _pinned(original(_pinned(tf.convert_to_tensor(input), keeps_rows), multiples, name), keeps_rows)


@calling
def _of_matrices(original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    matrices = tf.convert_to_tensor(input)
    are_rows = matrices.shape.rank is not None and matrices.shape.rank > 2
    return _pinned(original(_pinned(matrices, are_rows), *args, **kwargs), are_rows)


@calling
def _of_segments(original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps an operation on segments: a row's gradient is looked up in that of its segment.

    The layer before may want it cut by its features.
    """
    return original(_pinned(tf.convert_to_tensor(data), False), *args, **kwargs)


@calling
def _sorting(original: Any, input: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps top_kv2: of a vector, whose only rows are its entries, all are gathered."""
    found = original(_pinned(tf.convert_to_tensor(input), input.shape.rank != 1), k, *args, **kwargs)
    largest, places = (_pinned(x, x.shape.rank != 1, of_any_kind=True) for x in found)
    return type(found)(largest, places)


@calling
def _taking_along(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
    """Wraps Keras's take_along_axis, by places in the flat whole value.

    Shapes that Keras computes in a step DTensor does not know.
    """
    mesh = slicing.mesh_here()
    x, indices = tf.convert_to_tensor(x), tf.convert_to_tensor(indices)
    is_static = x.shape.is_fully_defined() and indices.shape.is_fully_defined()
    if mesh is None or not is_static or x.shape.rank != indices.shape.rank or axis is None:
        return original(x, indices, axis=axis)
    x, indices = slicing.whole(x, mesh), slicing.whole(indices, mesh)
    rank = x.shape.rank
    order = [dim for dim in range(rank) if dim != axis % rank] + [axis % rank]
    x, indices = tf.transpose(x, order), tf.transpose(indices, order)
    before = tf.broadcast_static_shape(x.shape[:-1], indices.shape[:-1]).as_list()
    size, count = x.shape[-1], indices.shape[-1]
    flat = tf.reshape(tf.broadcast_to(x, [*before, size]), [-1])
    places = tf.reshape(tf.broadcast_to(indices, [*before, count]), [-1, count])
    places = tf.where(places < 0, places + size, places)
    places += tf.constant(np.arange(places.shape[0])[:, None] * size, places.dtype)
    found = tf.reshape(tf.gather(flat, tf.reshape(places, [-1])), [*before, count])
    return slicing.whole(tf.transpose(found, list(np.argsort(order))), mesh)


@calling
def _drawing(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _pinned(original(*args, **kwargs), False, of_any_kind=True)


@calling
def _unpacking(original: Any, value: Any, num: int, axis: int = 0, name: Any = None) -> Any:
    # Rows stand first, and second behind the steps of a sequence.
    found = original(_pinned(tf.convert_to_tensor(value), True, rows=int(axis == 0)), num, axis, name)
    return [_pinned(part, True) for part in found]


@calling
def _convolving(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps a convolution, whose gradient is brought to the layout of its result.

    Where an op behind it has no rule, as averages of pools, the gradient comes whole. DTensor fails where a convolution
    of it is to be cut.
    """
    found = original(*args, **kwargs)
    if slicing.mesh_here() is None or tf.executing_eagerly():
        return found

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def pin(value: Any) -> tuple[Any, Any]:
        return tf.identity(value), lambda gradient: dtensor.relayout_like(gradient, value)

    return pin(found)


def _pinned(x: Any, keeps_rows: bool, rows: int = 0, of_any_kind: bool = False) -> Any:
    """Makes a program's tensor, and its gradient, whole along all dims, but its rows' where these stay."""
    mesh = slicing.mesh_here()
    # Shapes and paddings are joined too: DTensor must go on seeing constants in them.
    if mesh is None or tf.executing_eagerly() or not x.shape.rank or (x.dtype.is_integer and not of_any_kind):
        return x
    dims = [dtensor.UNSHARDED] * x.shape.rank
    if keeps_rows and rows < len(dims):
        dims[rows] = MATCH
    layout = dtensor.Layout(dims, mesh)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def pin(value: Any) -> tuple[Any, Any]:
        return dtensor.relayout(value, layout), lambda gradient: dtensor.relayout(gradient, layout)

    return pin(x)


_layers: ContextVar[frozenset[int]] = ContextVar("unidist_dtensor_unrolled", default=frozenset())


@contextlib.contextmanager
def unrolled(model: Any) -> Iterator[None]:
    """Inside, the model's recurrent layers are unrolled."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, RNN) and not layer.unroll]
    token = _layers.set(frozenset(map(id, layers)))
    for layer in layers:
        layer.unroll = True
    try:
        yield
    finally:
        _layers.reset(token)
        for layer in layers:
            layer.unroll = False


@calling
def _looping(original: Any, self: Any, sequences: Any, initial_state: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps RNN.inner_loop, with the zeros of Keras's loop for masked steps of a reversed sequence.

    Keras's unrolled steps lay the mask as it was given onto outputs that are the other way round.
    """
    is_ours = id(self) in _layers.get() and self.go_backwards and self.return_sequences
    if not is_ours or not self.zero_output_for_mask or mask is None:
        return original(self, sequences, initial_state, mask, *args, **kwargs)
    self.zero_output_for_mask = False
    try:
        last, outputs, states = original(self, sequences, initial_state, mask, *args, **kwargs)
    finally:
        self.zero_output_for_mask = True
    steps = tf.unstack(tree.flatten(mask)[0], axis=1)[::-1]
    return _zeroed(last, steps[-1]), _zeroed(outputs, tf.stack(steps, axis=1)), states


def _zeroed(x: Any, mask: Any) -> Any:
    """x where the mask, of its first dims, has True."""
    wide = tf.reshape(mask, [*mask.shape, *[1] * (len(x.shape) - len(mask.shape))])
    return tf.where(wide, x, tf.zeros_like(x))
