"""Traces recurrent layers step by step: DTensor cannot partition lists of tensors in loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from keras import tree

from unidist.keras.patching.compat import RNN
from unidist.keras.patching.patches import Hook, calling

_layers: ContextVar[frozenset[int]] = ContextVar("unidist_dtensor_unrolled", default=frozenset())


def hooks() -> tuple[Hook, ...]:
    return (Hook(RNN, "inner_loop", _looping, "masks of sequences that are read backwards"),)


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
