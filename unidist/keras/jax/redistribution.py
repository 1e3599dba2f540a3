"""The one rule in a compiled step: storage to compute before a call, its gradient to state, and back.

A layer that treats each row alone is called on each data shard's rows, with collectives of its own (regions.py). For
all others each of the three is a constraint that the compiler must fulfil, on global arrays. Nothing that a model, a
loss or a step written by hand computes changes by either. Of a constraint the compiler chooses the collectives: a
partial gradient becomes a reduce_scatter on TPUs and GPUs, and an all_reduce after which each device keeps its part on
CPUs, where XLA has no such pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding
from keras import Model

from unidist.keras.jax import layouts, placing, regions, zero_collectives
from unidist.keras.jax.experts import weighing
from unidist.keras.patching.compat import in_stateless_scope
from unidist.keras.patching.patches import calling
from unidist.keras.strategies.distribution import adopt


@calling
def calling_stateless(
    original: Any, self: Any, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
) -> Any:
    """Layer.stateless_call: the layer is given its variables in their compute layouts."""
    distribution = placing.current()
    region = None
    if distribution is not None and self.built:
        if isinstance(self, Model):
            args, kwargs = layouts.given((args, kwargs), distribution)
        variables = self.trainable_variables
        placed = _placements(variables, distribution)
        region = _region(distribution, variables, placed, trainable_variables)
        trainable_variables = _each(_to_compute, placed, trainable_variables)
        others = _placements(self.non_trainable_variables, distribution)
        non_trainable_variables = _each(_gathered, others, non_trainable_variables)
    try:
        with regions.entering(region):
            given = (self, trainable_variables, non_trainable_variables, *args)
            if distribution is None or adopt(distribution).strategy.experts != "dispatch":
                return original(*given, **kwargs)
            return weighing.calling(self, distribution, original, (given, kwargs))
    finally:
        if distribution is not None and not in_stateless_scope():
            regions.forget_losses(self)


def _placements(variables: Any, distribution: Any) -> list[layouts.Placement]:
    return [layouts.placement(variable, distribution) for variable in variables]


def _region(distribution: Any, variables: Any, placed: list[layouts.Placement], values: Any) -> regions.Region | None:
    """The variables that the data axes cut; None where they cut none."""
    if len(variables) != len(values):
        return None
    axes = adopt(distribution).strategy.data_axes
    found = {id(v): zero_collectives.cut_of(layouts, axes) for v, layouts in zip(variables, placed, strict=True)}
    cuts = {key: cut for key, cut in found.items() if cut is not None}
    held = {id(v): value for v, value in zip(variables, values, strict=True)}
    return regions.Region(cuts, held) if cuts else None


@calling
def updating(original: Any, self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
    """Wraps Optimizer.stateless_apply: each device updates its part, which then goes to its storage."""
    distribution = placing.current()
    if distribution is None or not self.built:
        return original(self, optimizer_variables, grads, trainable_variables)
    placed = _placements(self._trainable_variables, distribution)
    grads = _each(_to_state, placed, grads)
    values = _each(_to_state, placed, trainable_variables)
    values, optimizer_variables = original(self, optimizer_variables, grads, values)
    return _each(_to_storage, placed, values), optimizer_variables


def _each(move: Callable[..., Any], placed: list[layouts.Placement], values: Any) -> Any:
    """The values moved, where each belongs to one variable. Keras itself refuses lists that do not match."""
    if len(placed) != len(values):
        return values
    return [
        value if value is None or not _is_moved(layouts) else move(layouts, value)
        for layouts, value in zip(placed, values, strict=True)
    ]


def _is_moved(placed: layouts.Placement) -> bool:
    return not placed.storage == placed.compute == placed.state


def _gathered(placed: layouts.Placement, value: Any) -> Any:
    return _constrained(value, placed.compute)


def _to_compute(placed: layouts.Placement, value: Any) -> Any:
    return _redistribution(placed.compute, placed.state)(value)


def _to_state(placed: layouts.Placement, value: Any) -> Any:
    # A sparse gradient's arrays are its numbers and their indices: it stays whole.
    return value if isinstance(value, JAXSparse) else _constrained(value, placed.state)


def _to_storage(placed: layouts.Placement, value: Any) -> Any:
    # Updated in parts, and gathered only then.
    return _constrained(_constrained(value, placed.state), placed.storage)


def _constrained(value: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(value, sharding)


@lru_cache(maxsize=1024)
def _redistribution(compute: NamedSharding, state: NamedSharding) -> Any:
    """A value goes to `compute`, its gradient to `state`.

    JAX's own transpose would bring the gradient to `compute` first: whole on each device.
    """

    @jax.custom_vjp
    def move(value: Any) -> Any:
        return _constrained(value, compute)

    def forward(value: Any) -> tuple[Any, None]:
        return move(value), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (_constrained(gradient, state),)

    move.defvjp(forward, backward)
    return move
