"""Pairs while generating: a language model's `call_with_cache` on this rank's heads and their part of the cache.

A pair is used only if it was proven on the model's own call (pairs.py), and if the first calls with a cache, one of a
prompt and one of a single token, give with it what they give without: logits, hidden states and the cache itself, on
all ranks. Attention layers share one array as cache, so either the pairs of all of them are in use, and a rank then
keeps the keys and values of its own heads only, or those of none. What fails is gathered.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist.keras.compat import tree
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame
from unidist.keras.torch.engine import Engine
from unidist.keras.torch.tensor_parallel import heads
from unidist.keras.torch.tensor_parallel.disturbing import is_close
from unidist.keras.torch.tensor_parallel.pairs import Pair, refused
from unidist.keras.torch.tensor_parallel.rules import Rule
from unidist.keras.torch.tensor_parallel.verdicts import agreed

_log = logging.getLogger(__name__)
HEADS_DIM = -2  # of a cache: (batch, layers, 2, length, heads, features)
_GATHERED = frozenset[int]()


@dataclass
class _Level:
    """Pairs that are in use together.

    Attributes:
        rules: ids of their rules.
        attention: the row of one attention layer, where the pairs of all of them are among these.
        heads: how many a cache has that is whole.
        proven: kinds of calls (of a single token, or not) that have proven it.
    """

    rules: frozenset[int]
    attention: Rule | None = None
    heads: int = 0
    proven: set[bool] = field(default_factory=set)

    @property
    def is_proven(self) -> bool:
        return not self.rules or len(self.proven) == 2

    def __str__(self) -> str:
        if not self.rules:
            return "gathered"
        return f"{len(self.rules)} layers on shards, the cache {'whole' if self.attention is None else 'cut by heads'}"


class CachedCalls:
    """A model's calls with a cache. Outside of generating they are Keras's own."""

    def __init__(self, model: Any, original: Any) -> None:
        self.model = model
        self.original = original
        self.signature = inspect.signature(original)
        self._levels: dict[int, list[_Level]] = {}
        self._pairs: dict[int, list[Pair]] = {}
        self._refused: dict[int, list[str]] = {}

    def prepare(self, found: Engine, frame: Frame) -> None:
        """Notes which pairs there are to be tried, on this rank."""
        if self._pairs.get(frame.rank) != found.pairs:
            self._pairs[frame.rank] = list(found.pairs or ())
            self._levels[frame.rank] = _levels(self.model, self._pairs[frame.rank])
            self._refused[frame.rank] = []

    def level(self, rank: int) -> tuple[int, bool]:
        """(number of layers that work on shards, whether the cache is cut as well), proven so far."""
        found = self._levels.get(rank)
        if not found or not found[0].is_proven:
            return 0, False
        return len(found[0].rules), found[0].attention is not None

    def why(self, rank: int) -> str:
        """What these calls do with the pairs, and what was refused for which reason."""
        found = self._levels.get(rank)
        if found is None or not found[0].is_proven:
            return "which pairs go with a cache is proven in the first calls of generate"
        if not self._pairs[rank]:
            return "gathered: the model's own call has no pairs"
        if not found[0].rules and not self._refused[rank]:
            return "gathered: the layers with a cache have no pairs, or pairs of several kinds"
        return "; not ".join([str(found[0]), *self._refused[rank]])

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
            against = self._against(level, given, cache, frame)
            if not against:
                level.proven.add(single)
            else:
                self._refused[frame.rank].append(f"{levels.pop(0)}: {against}")
                level = levels[0]
                level.heads = cache.shape[HEADS_DIM]
        if level.is_proven and frame.rank == frame.world.ranks[0]:
            _log.info("model %r, calls with a cache: %s", self.model.name, self.why(frame.rank))
        return wanted

    def _called(self, level: _Level, given: inspect.BoundArguments, cache: torch.Tensor, frame: Frame) -> Any:
        arguments = {**given.arguments, "cache": _own(level, cache, frame)}
        bound = inspect.BoundArguments(self.signature, arguments)
        with frame.trying(level.rules):
            return self.original(*bound.args, **bound.kwargs)

    def _against(self, level: _Level, given: inspect.BoundArguments, cache: torch.Tensor, frame: Frame) -> str:
        """What all ranks have against these pairs; "" where the call gives with them what it gives without: outputs,
        and what it leaves in the cache."""
        cache = cache.float() if cache.dtype in (torch.bfloat16, torch.float16) else cache
        with frame.widened():
            wanted = tree.flatten(self._called(_Level(_GATHERED), given, cache, frame))
            try:
                found = tree.flatten(self._called(level, given, cache, frame))
                wanted[-1] = _own(level, wanted[-1], frame)
                against = "" if is_close(found, wanted) else "outputs or the cache differ with it"
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                against = refused(error)
        return agreed(frame, [against])[0]


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
