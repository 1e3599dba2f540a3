"""The data of a Sharding in JAX: one global jax.Array.

    S(dim)   the dim is in the PartitionSpec; several axes on one dim are a tuple, major first
    P        one more leading dim for each partial axis (in the order of layout.partial), as long as the axis and
             sharded over it: place k holds the contribution of place k
    I, F     replicated

Where dims do not divide, every rank's part is padded at its end to the largest part, so the array's dim is the largest
part times the number of places. What the padding holds is unspecified. With even dims and no partial axis the data is
the plain global array.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from unidist.algebra import Sharding
from unidist.backends.protocol import Array, plain_array
from unidist.errors import LayoutError

Shape = tuple[int, ...]
_NEUTRAL = {"sum": 0, "mean": 0, "prod": 1}


@lru_cache(maxsize=16384)
def padded_local(sharding: Sharding) -> Shape:
    """Returns the shape of the largest part, which every rank's part is padded to.

    The first place of all axes holds it.
    """
    mesh = sharding.mesh
    return sharding.local_shape(mesh.rank_at(dict.fromkeys(mesh.axis_names, 0)))


@lru_cache(maxsize=16384)
def data_shape(sharding: Sharding) -> Shape:
    """The shape of the global jax.Array."""
    mesh, layout = sharding.mesh, sharding.layout
    stack = tuple(mesh.axis_size(axis) for axis in layout.partial_axes)
    local = padded_local(sharding)
    return stack + tuple(n * mesh.axis_size(layout.dim_axes(dim)) for dim, n in enumerate(local))


@lru_cache(maxsize=16384)
def partition_spec(sharding: Sharding) -> PartitionSpec:
    """The PartitionSpec of the global jax.Array."""
    layout = sharding.layout
    dims = [axes[0] if len(axes) == 1 else (axes or None) for axes in layout.dims]
    return PartitionSpec(*layout.partial_axes, *dims)


def known(value: Any) -> Any:
    """A jax.Array as it is; else a NumPy array, where what has no dtype (Python's numbers) gets JAX's."""
    if isinstance(value, jax.Array):
        return value
    array = plain_array(value)
    return array if hasattr(value, "dtype") else np.asarray(jax.numpy.asarray(array))


def pad(shard: Array, sharding: Sharding) -> Array:
    """A rank's part as its device holds it: a NumPy array of its own, padded, with the leading dims of P."""
    local = padded_local(sharding)
    stack = (1,) * len(sharding.layout.partial)
    if shard.shape == local:
        return np.array(shard).reshape(stack + local)
    padded = np.zeros(local, shard.dtype)
    padded[tuple(slice(n) for n in shard.shape)] = shard
    return padded.reshape(stack + local)


def contribution(whole: Array, sharding: Sharding, rank: int) -> Array:
    """Returns a rank's padded part of a full value.

    It is the rank's region, at place 0 of partial axes, and neutral elements elsewhere.
    """
    here = sharding.mesh.coordinate(rank)
    part = whole[sharding.slices(rank)]
    for axis, op in sharding.layout.partial:
        if op == "mean":
            if whole.dtype.kind in "biu":
                raise LayoutError(f"a mean of {whole.dtype} values is no {whole.dtype}: cast to a float")
            part = np.asarray(part * np.asarray(sharding.mesh.axis_size(axis), part.dtype), part.dtype)
        if here[axis] and op in _NEUTRAL:
            part = np.full_like(part, _NEUTRAL[op])
    return pad(part, sharding)


def pad_on_device(shard: jax.Array, sharding: Sharding) -> jax.Array:
    """As `pad`, where the part is on its device already."""
    local = padded_local(sharding)
    if shard.shape != local:
        shard = jax.numpy.pad(shard, [(0, most - n) for n, most in zip(shard.shape, local, strict=True)])
    stack = (1,) * len(sharding.layout.partial)
    return shard.reshape(stack + local) if stack else shard


def strip(held: jax.Array, sharding: Sharding, rank: int) -> jax.Array:
    """A rank's part of what its device holds: without padding and leading dims."""
    shape = sharding.local_shape(rank)
    if sharding.layout.partial:
        held = held.reshape(padded_local(sharding))
    return held if held.shape == shape else held[tuple(slice(n) for n in shape)]


def assemble(
    parts: Mapping[int, Any], sharding: Sharding, native: jax.sharding.NamedSharding, device: Any, dtype: Any
) -> jax.Array:
    """Returns the global array of padded parts, rank -> what its device shall hold.

    `device` gives the device of a rank.
    """
    ranks = list(parts)
    buffers = jax.device_put([parts[rank] for rank in ranks], [device(rank) for rank in ranks])
    return jax.make_array_from_single_device_arrays(data_shape(sharding), native, buffers, dtype=dtype)


@cache
def register_tree() -> None:
    """Makes DistributedArray a pytree: its data is the leaf, sharding and backend are static.

    The class lives in a room above this one, so it is fetched by name.
    """
    array_type = importlib.import_module("unidist.array").DistributedArray
    jax.tree_util.register_pytree_with_keys(
        array_type,
        lambda x: (((jax.tree_util.GetAttrKey("data"), x.data),), (x.sharding, x._backend)),
        lambda static, leaves: array_type(*leaves, *static),
        lambda x: ((x.data,), (x.sharding, x._backend)),
    )
