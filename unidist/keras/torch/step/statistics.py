"""Batch statistics over all data shards, and random numbers that differ where rows differ."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from unidist import events
from unidist.keras import needs, numbers
from unidist.keras.patching.compat import (
    BatchNormalization,
    SeedGenerator,
    get_device,
    torch_core,
    torch_random,
)
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.planning.activations import as_in_a_step
from unidist.keras.torch import features
from unidist.keras.torch.context import frame, infers_shapes
from unidist.keras.torch.params import placing
from unidist.keras.torch.step import program_draws


def hooks() -> tuple[Hook, ...]:
    """Without a frame they are as before."""
    random, whole = "random numbers differ where rows do", "batch statistics of all rows"
    normalizes, moments = needs.of_kinds("BatchNormalization"), calling(_moments)
    return (
        Hook(BatchNormalization, "_moments", moments, whole, needed=normalizes),
        Hook(SeedGenerator, "next", calling(_next), random, needed=needs.draws),
        Hook(torch_random, "dropout", calling(_dropout), random, needed=needs.draws),
        *program_draws.hooks(),
    )


def _moments(original: Any, self: Any, inputs: Any, mask: Any) -> Any:
    here = frame()
    if here is None or here.rows is None or not here.world.cuts_rows or infers_shapes():
        return original(self, inputs, mask)
    with events.for_purpose("batch statistics"):
        return numbers.moments(inputs, self._reduction_axes, mask, torch.sum, here.world.of_shards)


def _next(original: Any, self: Any, ordered: bool = True) -> Any:
    here = frame()
    if not isinstance(self.state._value, torch.Tensor):
        # Of a layer that a tf.data.Dataset calls: Keras computes it on TensorFlow.
        return original(self, ordered)
    if here is not None and here.written:
        here.note_write(self.state)  # also of a generator that belongs to no model
    with _where(self.state):
        seed = original(self, ordered)
    if here is None or not here.seed_place or seed.is_meta:
        return seed
    return seed + torch.tensor([numbers.seed_offset(here.seed_place), 0], dtype=seed.dtype, device=seed.device)


def keep_seeds_on_host(model: Any) -> None:
    """Puts the states of a model's random generators where torch's own are seeded from.

    Read from a GPU, each dropout would wait for all that it has yet to compute.
    """
    for generator in {id(g): g for layer in model._flatten_layers() for g in layer._seed_generators}.values():
        if placing.is_placed(generator.state):
            for shard in generator.state._storage.shards.values():
                shard.data = shard.data.cpu()


def _where(state: Any) -> AbstractContextManager[Any]:
    """Inside Keras computes the next seed where the state is."""
    is_apart = state._value.device.type == "cpu" and torch.device(get_device()).type not in ("cpu", "meta")
    return torch_core.device_scope("cpu") if is_apart else contextlib.nullcontext()


def _dropout(original: Any, inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    """Draws every dropout by its seed, where a rank is at work.

    Without one Keras would take torch's own random numbers, unknown to ranks: replicas would drop different units.
    """
    here = frame()
    if here is not None and features.is_cut(inputs) and noise_shape is None and not here.exact:
        axes = features.axes_of(inputs)
        with here.seeds_at(here.world.seed_place(here.rank, axes)) if axes else contextlib.nullcontext():
            return features.on_parts(lambda part: _dropout(original, part, rate, seed=seed), inputs)
    draws_by_seed = as_in_a_step.get() if here is None else not here.exact
    if draws_by_seed and noise_shape is None and isinstance(seed, SeedGenerator):
        noise_shape = tuple(inputs.shape)
    if here is not None and here.is_tracing and seed is not None and 0 < rate < 1:
        return program_draws.dropout(inputs, rate, noise_shape or tuple(inputs.shape), seed)
    return original(inputs, rate, noise_shape=noise_shape, seed=seed)
