"""Reads masks and logits of a tensor from what stands for it with other rows, on Keras's TensorFlow.

Keras's crossentropies take the logits that an activation of the last layer was given: they look for them at its result.
A tensor that was gathered or cut leads them back there, and what they find is gathered or cut then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.keras.patching.compat import get_keras_mask, set_keras_mask, tensorflow_nn
from unidist.keras.patching.patches import Hook, calling

Tensor = Any  # tf.Tensor; TensorFlow has no types

# On a tensor: the one that it stands for, and what moved that one's rows.
_SOURCE = "_unidist_source"


def moved(x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns move(x), with the mask of x, and the logits of x if somebody asks for them."""
    found = move(x)
    if (mask := get_keras_mask(x)) is not None:
        set_keras_mask(found, move(mask))
    if found is not x:
        setattr(found, _SOURCE, (x, move))
    return found


def hook() -> Hook:
    return Hook(tensorflow_nn, "_get_logits", calling(_logits), "crossentropies know the logits of gathered outputs")


def _logits(original: Any, output: Tensor, from_logits: bool, op_type: str, name: str) -> tuple[Tensor, bool]:
    """Keras's _get_logits: the logits and True, or the output and from_logits where no activation gave it."""
    if not hasattr(output, _SOURCE):
        found: tuple[Tensor, bool] = original(output, from_logits, op_type, name)
        return found
    source, move = getattr(output, _SOURCE)
    logits, are_logits = _logits(original, source, from_logits, op_type, name)
    return (output if logits is source else move(logits)), are_logits
