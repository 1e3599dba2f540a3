"""Ranks without rows: the last batch of an epoch may have fewer rows than there are data shards.

Most layers compute with no rows as with any number. What Keras and torch refuse is mended here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist.keras.calls import Call, Stage
from unidist.keras.compat import DataLayer, torch_numpy
from unidist.keras.explicit import context
from unidist.keras.explicit.calls import around_call
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.parts import mapped
from unidist.keras.interception import Hook


def hooks() -> Iterator[Hook]:
    for name, reduce in (("max", torch.amax), ("min", torch.amin)):
        yield Hook(torch_numpy, name, functools.partial(_of_no_rows, reduce), "a rank may have no rows")


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


def install(model: Any) -> None:
    """Lets a model's layers that prepare data be called where there are no rows: torch resizes no empty images."""
    for layer in model._flatten_layers():
        if isinstance(layer, DataLayer) and not hasattr(layer, _MARK):
            around_call(layer, Stage.ROWLESS, _with_one)
            object.__setattr__(layer, _MARK, True)


# On a layer that is seen to.
_MARK = "_unidist_rowless_call"


def _with_one(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
    """A call on one made-up row, whose results are cut off."""
    if frame.rows is None or frame.rows.local:
        return rest(*args, **kwargs)
    empty: list[torch.Tensor] = []

    def filled(x: Any) -> Any:
        if not _is_empty(x) or x.shape[0]:
            return x
        empty.append(x)
        return x.new_zeros((1, *x.shape[1:]))

    out = rest(*mapped(filled, args), **mapped(filled, kwargs))
    return mapped(lambda x: x[:0] if isinstance(x, torch.Tensor) and x.ndim else x, out) if empty else out


def _is_empty(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and not x.numel()
