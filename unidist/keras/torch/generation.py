"""Generating text: a causal language model's `generate` runs on every rank, on shards of the weights.

A generate function is no step of Keras's trainer, so it is entered here. Each rank generates for all prompts with the
same random numbers. Of the keys and values in a cache each rank keeps those of its heads: a cache into which a part is
written is cut from then on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.array import DistributedArray
from unidist.keras.needs import generates
from unidist.keras.patching.compat import Trainer, torch_core, tree
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import engine, features
from unidist.keras.torch.context import Frame, frame
from unidist.keras.torch.params import placing
from unidist.keras.torch.params.storage import Shardings
from unidist.keras.torch.params.variables import place


def hooks() -> tuple[Hook, ...]:
    """After Trainer.compile a model of keras_hub can generate."""
    update, whole = calling(_slice_update), "a cache is cut"
    return (
        Hook(Trainer, "compile", _compiling, "generate runs on every rank", needed=generates),
        Hook(torch_core, "slice_update", update, whole, needed=generates),
    )


def _slice_update(original: Any, inputs: Any, start_indices: Any, updates: Any) -> Any:
    """Replaces Keras's slice_update, which writes at flat places, which no rule cuts.

    Along a dim that is updated as a whole each rank writes its own part.
    """
    here = frame()
    cut = next((x for x in (inputs, updates) if features.is_cut(x) and features.axes_of(x)), None)
    if here is not None and cut is not None and cut.spec.space.invariant:
        dim, axes = cut.spec.states[0].dim, features.axes_of(cut)
        size = inputs.shape[dim]
        if updates.shape[dim] == size:
            own, new = (features.taken(here, x, dim, axes) for x in (inputs, updates))
            return features.given(here, original(own, start_indices, new), dim, size, axes)
    return original(inputs, start_indices, updates)


@calling
def _compiling(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if hasattr(self, "make_generate_function"):
        _adopt(self)
    return result


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
        with frame.seeds_at(0), events.for_purpose("generate"):
            return tree.map_structure(features.whole, self.function(own, stop_token_ids=stop_token_ids))

    def _place_seeds(self) -> None:
        """A sampler's random state is no variable of the model: each rank gets its own, all alike."""
        world = self.engine.world
        states = list(getattr(self.engine.model.sampler, "variables", ()))
        for state in states:
            if not placing.is_placed(state):
                place(state, world, Shardings.alike(Sharding(world.mesh, Layout(), tuple(state.shape))))
                placing.equalize([state], world)
