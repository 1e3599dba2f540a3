"""Ranks with no row or one: the last batch of an epoch may have fewer rows than there are data shards.

Layers compute with them as with any number. What Keras and torch refuse is mended here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist.backends.torch.sharded.bindings.layers import convolved
from unidist.keras import needs
from unidist.keras.patching.compat import torch_image, torch_numpy
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import context

_TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn")


def hooks() -> Iterator[Hook]:
    for name, reduce in (("max", torch.amax), ("min", torch.amin)):
        yield Hook(torch_numpy, name, functools.partial(_of_no_rows, reduce), "a rank may have no rows")
    yield Hook(torch_numpy, "reshape", _reshaping, "a rank may have no rows")
    why = "a rank may have no rows"
    yield Hook("torch.nn.functional:", "ctc_loss", _of_no_sequences, why, needed=needs.of_loss("CTC"))
    for name in ("affine_transform", "elastic_transform"):
        yield Hook(torch_image, name, _of_one_more, why, needed=needs.of_images)
    for owner, names in (("torch.fft:", _TRANSFORMS), ("torch:", ("stft", "istft"))):
        for name in names:
            yield Hook(owner, name, _of_one_more, why, needed=needs.of_signals)
    yield Hook("torch.nn.functional:", "conv2d", _of_one_image, "a rank may have one row", needed=needs.convolves)


@calling
def _of_one_more(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes one row that is made up, where torch or Keras refuses none, and keeps nothing of it."""
    first: Any = next(iter((*args, *kwargs.values())), None)
    if context.frame() is None or not _is_empty(first) or first.ndim < 2 or first.shape[0]:
        return original(*args, **kwargs)
    named = {key: _with_one_more(x) for key, x in kwargs.items()}
    return original(*map(_with_one_more, args), **named)[:0]


def _with_one_more(x: Any) -> Any:
    return torch.cat([x, x.new_ones(1, *x.shape[1:])]) if _is_empty(x) else x


@calling
def _of_one_image(original: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    given = original if context.frame() is None else functools.partial(convolved, original)
    return given(input, weight, *args, **kwargs)


@calling
def _of_no_sequences(original: Any, log_probs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch refuses the losses of no sequences: they are none, and stay in the graph."""
    if context.frame() is None or not _is_empty(log_probs) or log_probs.ndim != 3 or log_probs.shape[1]:
        return original(log_probs, *args, **kwargs)
    return log_probs.sum((0, 2))


def _of_no_rows(reduce: Callable[..., torch.Tensor], original: Any) -> Callable[..., Any]:
    """Along dims that are not empty the largest of no rows are no rows. Keras refuses whatever is empty."""

    @functools.wraps(original)
    def extreme(x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Any:
        if context.frame() is None or axis is None or initial is not None or not _is_empty(x):
            return original(x, axis=axis, keepdims=keepdims, initial=initial)
        dims = [dim % x.ndim for dim in (axis if isinstance(axis, (list, tuple)) else [axis])]
        if not all(x.shape[dim] for dim in dims):
            return original(x, axis=axis, keepdims=keepdims, initial=initial)
        return reduce(x, dim=dims, keepdim=keepdims)

    return extreme


@calling
def _reshaping(original: Any, x: Any, newshape: Any) -> Any:
    """Gives no rows of so many entries another shape: torch finds no size for what is left open."""
    sizes = list(newshape) if isinstance(newshape, (list, tuple)) else [newshape]
    if context.frame() is not None and _is_empty(x) and not x.shape[0] and sizes[0] == 0 and sizes.count(-1) == 1:
        each = math.prod(x.shape[1:])
        known = math.prod(n for n in sizes[1:] if n != -1)
        newshape = [each // known if n == -1 and known else n for n in sizes]
    return original(x, newshape)


def _is_empty(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and not x.numel()
