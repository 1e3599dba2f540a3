"""Generating text: a causal language model's `generate` runs on every rank, on shards of the weights.

A generate function is no step of Keras's trainer, so it is entered here. Each rank generates for all prompts with the
same random numbers. Pairs are in use in calls with a cache alone, where they are proven (cached.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.array import DistributedArray
from unidist.keras.compat import Trainer, tree
from unidist.keras.interception import Hook
from unidist.keras.needs import generates
from unidist.keras.torch import cached, engine
from unidist.keras.torch.context import Frame
from unidist.keras.torch.values import placing
from unidist.keras.torch.values.storage import Shardings
from unidist.keras.torch.values.variables import place


def hooks() -> tuple[Hook, ...]:
    """After Trainer.compile a model of keras_hub can generate."""
    return (Hook(Trainer, "compile", _compiling, "generate runs on every rank", needed=generates),)


def _compiling(original: Any) -> Any:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hasattr(self, "make_generate_function"):
            _adopt(self)
        return result

    return compile


def _adopt(model: Any) -> None:
    if "make_generate_function" in vars(model):
        return
    original = model.make_generate_function

    @functools.wraps(original)
    def make_generate_function() -> Any:
        function = original()
        found = engine.engine_of(model)
        if found is None or isinstance(function, GenerateFunction):
            return function
        model.generate_function = GenerateFunction(found, function)
        return model.generate_function

    object.__setattr__(model, "make_generate_function", make_generate_function)
    cached.adopt(model)


class GenerateFunction:
    """A model's generate function on every rank; the first rank's result."""

    def __init__(self, found: engine.Engine, function: Any) -> None:
        self.engine = found
        self.function = function

    def __call__(self, inputs: Any, stop_token_ids: Any = None) -> Any:
        found = self.engine
        with found.session():
            found.prepare()
            self._place_seeds()
            # In a scope keras_hub lays prompts out over the data axes; here each rank generates for all.
            inputs = tree.map_structure(lambda x: x.numpy() if isinstance(x, DistributedArray) else x, inputs)
            return found.world.run(lambda frame: self._on_rank(frame, inputs, stop_token_ids))

    def _on_rank(self, frame: Frame, inputs: Any, stop_token_ids: Any) -> Any:
        own = tree.map_structure(lambda x: torch.as_tensor(x).clone(), inputs)
        self._prepare_pairs(frame, own)
        with frame.trying(frozenset()), frame.seeds_at(0), events.for_purpose("generate"):
            return self.function(own, stop_token_ids=stop_token_ids)

    def _prepare_pairs(self, frame: Frame, inputs: Any) -> None:
        """Proves the pairs on the prompts, where they are what the model itself is called with."""
        model = self.engine.model
        calls, described = getattr(model, "call_with_cache", None), getattr(model, "input", None)
        if not isinstance(calls, cached.CachedCalls) or not isinstance(described, dict) or not isinstance(inputs, dict):
            return
        if described.keys() <= inputs.keys():
            self.engine.prove_pairs(frame, {name: inputs[name] for name in described})
            calls.prepare(self.engine, frame)

    def _place_seeds(self) -> None:
        """A sampler's random state is no variable of the model: each rank gets its own, all alike."""
        world = self.engine.world
        states = list(getattr(self.engine.model.sampler, "variables", ()))
        for state in states:
            if not placing.is_placed(state):
                place(state, world, Shardings.alike(Sharding(world.mesh, Layout(), tuple(state.shape))))
                placing.equalize([state], world)
