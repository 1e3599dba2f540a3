"""Caches while generating: each rank keeps the keys and values of its own heads.

A language model's `call_with_cache` is given the cache as a carrier, cut by heads over the axes that cut the kernels of
its attention layers, and gives one so. Caches whose heads do not divide stay whole.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from unidist.algebra import Axes
from unidist.keras.compat import tree
from unidist.keras.torch import context, features
from unidist.keras.torch.engine import Engine

HEADS_DIM = -2  # of a cache: (batch, layers, 2, length, heads, features)


class CachedCalls:
    """A model's calls with a cache. Outside of frames they are Keras's own.

    Attributes:
        axes: those that cut a cache; none before the first `generate`, or where layers are cut otherwise.
    """

    def __init__(self, model: Any, original: Any) -> None:
        self.axes: Axes = ()
        self._model, self._original = model, original
        self._signature = inspect.signature(original)

    def prepare(self, found: Engine) -> None:
        """Looks up which axes cut the attention layers."""
        layers = _caching_layers(self._model)
        inside = {id(child) for layer in layers for child in layer._flatten_layers(include_self=False, recursive=False)}
        axes = {rule.axes for rule in found.rules if id(rule.layer) in inside and rule.kind in ("column", "row")}
        self.axes = axes.pop() if len(axes) == 1 else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        given = self._signature.bind(*args, **kwargs)
        cache = given.arguments.get("cache")
        if frame is None or not self.axes or not isinstance(cache, torch.Tensor) or cache.ndim < -HEADS_DIM:
            return self._original(*args, **kwargs)
        size = cache.shape[HEADS_DIM]
        if size % frame.world.mesh.axis_size(self.axes) == 0:
            part = features.taken(frame, cache, HEADS_DIM, self.axes)
            given.arguments["cache"] = features.given(frame, part, HEADS_DIM, size, self.axes)
        out = self._original(*given.args, **given.kwargs)
        return tree.map_structure(lambda x: x if getattr(x, "shape", None) == cache.shape else features.whole(x), out)


def adopt(model: Any) -> None:
    """Lets a model's calls with a cache cut it, where they are of the kind that language models have."""
    original = getattr(model, "call_with_cache", None)
    if original is None or isinstance(original, CachedCalls) or "cache" not in inspect.signature(original).parameters:
        return
    object.__setattr__(model, "call_with_cache", functools.wraps(original)(CachedCalls(model, original)))


def _caching_layers(model: Any) -> list[Any]:
    """The innermost layers that take a cache."""
    takes = [layer for layer in model._flatten_layers() if "cache" in inspect.signature(type(layer).call).parameters]
    known = {id(layer) for layer in takes}
    return [x for x in takes if not any(id(y) in known for y in x._flatten_layers(include_self=False))]
