"""Pairs while generating: a language model's `call_with_cache` on this rank's heads and their part of the cache.

A pair is used only if it was proven on the model's own call (pairs.py), and if the first calls with a cache, one of a
prompt and one of a single token, give with it what they give without: logits, hidden states and the cache itself, on
all ranks. Attention layers share one array as cache, so either the pairs of all of them are in use, and a rank then
keeps the keys and values of its own heads only, or those of none. What fails is gathered.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist.errors import UnidistError
from unidist.keras.compat import tree
from unidist.keras.explicit import context, heads
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.engine import Engine
from unidist.keras.explicit.pairs import Pair, all_agree, is_close
from unidist.keras.explicit.rules import Rule

HEADS_DIM = -2  # of a cache: (batch, layers, 2, length, heads, features)
_GATHERED = frozenset[int]()


@dataclass
class _Level:
    """Pairs that are in use together.

    Attributes:
        rules: ids of their rules.
        attention: the row of one attention layer, where the pairs of all of them are among these.
        heads: how many a cache has that is whole.
        proven: kind of call (of a single token, or not) -> whether it was proven.
    """

    rules: frozenset[int]
    attention: Rule | None = None
    heads: int = 0
    proven: dict[bool, bool] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        return not self.rules or all(self.proven.get(kind, False) for kind in (False, True))


class CachedCalls:
    """A model's calls with a cache. Outside of generating they are Keras's own."""

    def __init__(self, model: Any, original: Any) -> None:
        self.model = model
        self.original = original
        self.signature = inspect.signature(original)
        self._levels: dict[int, list[_Level]] = {}
        self._pairs: dict[int, list[Pair]] = {}

    def prepare(self, found: Engine, frame: Frame) -> None:
        """Notes which pairs there are to be tried, on this rank."""
        if self._pairs.get(frame.rank) != found.pairs:
            self._pairs[frame.rank] = list(found.pairs or ())
            self._levels[frame.rank] = _levels(self.model, self._pairs[frame.rank])

    def level(self, rank: int) -> tuple[int, bool]:
        """(number of layers that work on shards, whether the cache is cut as well), proven so far."""
        found = self._levels.get(rank)
        if not found or not found[0].is_proven:
            return 0, False
        return len(found[0].rules), found[0].attention is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        given = self.signature.bind(*args, **kwargs)
        cache = given.arguments.get("cache")
        levels = self._levels.get(frame.rank) if frame is not None else None
        if frame is None or not levels or not isinstance(cache, torch.Tensor) or cache.ndim < -HEADS_DIM:
            return self.original(*args, **kwargs)
        level = levels[0]
        if level.is_proven:
            return self._called(level, given, cache, frame)
        single, level.heads = _is_single(given), cache.shape[HEADS_DIM]
        wanted = self._called(_Level(_GATHERED), given, cache, frame)
        while single not in level.proven and level.rules:
            if self._holds(level, given, cache, frame):
                level.proven[single] = True
            else:
                levels.pop(0)
                level = levels[0]
                level.heads = cache.shape[HEADS_DIM]
        return wanted

    def _called(self, level: _Level, given: inspect.BoundArguments, cache: torch.Tensor, frame: Frame) -> Any:
        arguments = {**given.arguments, "cache": _own(level, cache, frame)}
        bound = inspect.BoundArguments(self.signature, arguments)
        with frame.trying(level.rules):
            return self.original(*bound.args, **bound.kwargs)

    def _holds(self, level: _Level, given: inspect.BoundArguments, cache: torch.Tensor, frame: Frame) -> bool:
        """Whether the call gives with these pairs what it gives without: outputs, and what it leaves in the cache."""
        cache = cache.float() if cache.dtype in (torch.bfloat16, torch.float16) else cache
        with frame.widened():
            wanted = tree.flatten(self._called(_Level(_GATHERED), given, cache, frame))
            try:
                found = tree.flatten(self._called(level, given, cache, frame))
                wanted[-1] = _own(level, wanted[-1], frame)
                same = is_close(found, wanted)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if isinstance(error, UnidistError):
                    raise
                # Shards do not fit where the call wants the whole. All ranks see it alike.
                same = False
        return all_agree(frame, [same])[0]


def adopt(model: Any) -> None:
    """Lets a model's calls with a cache use pairs, where they are of the kind that language models have."""
    original = getattr(model, "call_with_cache", None)
    if original is None or isinstance(original, CachedCalls) or "cache" not in inspect.signature(original).parameters:
        return
    object.__setattr__(model, "call_with_cache", functools.wraps(original)(CachedCalls(model, original)))


def _is_single(given: inspect.BoundArguments) -> bool:
    """Whether it is a call of one token a row."""
    tokens = next(iter(given.arguments.values()))
    return len(tokens.shape) > 1 and tokens.shape[1] == 1


def _levels(model: Any, pairs: list[Pair]) -> list[_Level]:
    """What is tried in turn: all pairs, those that have nothing to do with a cache, none."""
    attentions = _caching_layers(model)
    inside = {id(child) for layer in attentions for child in layer._flatten_layers(include_self=False, recursive=False)}
    cached = [pair for pair in pairs if id(pair.row.layer) in inside]
    found = [_Level(_ids([pair for pair in pairs if id(pair.row.layer) not in inside])), _Level(_GATHERED)]
    kinds = {(pair.row.axes, pair.row.parts, pair.row.share) for pair in cached}
    if len(cached) == len(attentions) and len(kinds) == 1:
        found.insert(0, _Level(_ids(pairs), cached[0].row))
    return found


def _caching_layers(model: Any) -> list[Any]:
    """The innermost layers that take a cache."""
    takes = [layer for layer in model._flatten_layers() if "cache" in inspect.signature(type(layer).call).parameters]
    known = {id(layer) for layer in takes}
    return [x for x in takes if not any(id(y) in known for y in x._flatten_layers(include_self=False))]


def _ids(pairs: list[Pair]) -> frozenset[int]:
    return frozenset(id(rule) for pair in pairs for rule in pair.rules)


def _own(level: _Level, cache: torch.Tensor, frame: Frame) -> torch.Tensor:
    """The part of a cache that this rank's heads use; of a cache that is that part already, itself."""
    if level.attention is None or cache.shape[HEADS_DIM] != level.heads:
        return cache
    return cache.narrow(HEADS_DIM, *heads.own_keys(level.attention, frame, level.heads))
