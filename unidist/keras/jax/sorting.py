"""Sorts inside of steps: along a dim that does not divide over the devices they need it whole.

XLA's partitioner ends the process ("spmd_partitioner_util.cc: Check failed") where such a dim is cut (JAX 0.10): the
rows of a ragged batch, or of what a layer left out of an even one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from unidist.keras.jax import layouts, placing


def binding(original: Any) -> Any:
    """The `bind` of JAX's primitive sort, which jnp's sort, argsort, quantile and median come to."""

    @functools.wraps(original)
    def bind(*operands: Any, **params: Any) -> Any:
        distribution = placing.current()
        if distribution is None or jax.sharding.get_abstract_mesh().manual_axes:
            return original(*operands, **params)
        mesh, shape, dim = distribution.device_mesh.backend_mesh, operands[0].shape, params["dimension"]
        if not any(isinstance(operand, jax.core.Tracer) for operand in operands) or not shape[dim] % mesh.size:
            return original(*operands, **params)
        dims = [None if place == dim else PartitionSpec.UNCONSTRAINED for place in range(len(shape))]
        whole = functools.partial(jax.lax.with_sharding_constraint, shardings=layouts.named(mesh, *dims))
        # What comes out too: the partitioner cuts a sort as its results are cut.
        return [*map(whole, original(*map(whole, operands), **params))]

    return bind
