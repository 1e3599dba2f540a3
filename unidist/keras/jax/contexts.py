"""Contexts: axes of the mesh cut the places of sequences.

They do so where a batch is placed and where a model's call begins. All else is the compiler's: which of a model's
values stay cut, and how places of other devices are read.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding, PartitionSpec

from unidist.algebra import Axes
from unidist.errors import LayoutError
from unidist.keras.jax import layouts
from unidist.keras.patching.compat import get_keras_mask, set_keras_mask
from unidist.keras.strategies.distribution import adopt


def of_batch(array: Any, distribution: Any) -> NamedSharding:
    """Returns how an array of a batch is laid out: its rows, and its places where these divide.

    Raises:
        LayoutError: another dim than the first does not divide over its axes.
    """
    sharding = layouts.of_batch(array.shape, distribution)
    axes = _axes_of_places(array, distribution)
    if not axes or layouts.parts_of_dim(sharding, 1) > 1:
        return sharding
    return layouts.named(sharding.mesh, layouts.of_native(sharding).dim_axes(0) or None, axes)


def of_whole_rows(array: Any, distribution: Any) -> NamedSharding:
    """Returns the layout of an array all of whose rows each device has; places stay cut."""
    axes = _axes_of_places(array, distribution)
    mesh = distribution.device_mesh.backend_mesh
    return layouts.named(mesh, None, axes) if axes else layouts.named(mesh)


def given(tree: Any, distribution: Any) -> Any:
    """Returns what a model is given in a compiled step: the places of its sequences are cut.

    Raises:
        LayoutError: a sequence's places do not divide.
    """
    if not adopt(distribution).strategy.context_axes:
        return tree
    return jax.tree.map(functools.partial(_cut, distribution), tree, is_leaf=lambda leaf: isinstance(leaf, JAXSparse))


def _cut(distribution: Any, x: Any) -> Any:
    if not isinstance(x, jax.Array) or not _has_places(x, distribution):
        return x
    axes = _axes_of_places(x, distribution)
    if not axes:
        asked = adopt(distribution).strategy.context_axes
        parts = layouts.places(distribution.device_mesh.backend_mesh, asked)
        raise LayoutError(
            f"an input of shape {x.shape}: its {x.shape[1]} places (dim 1) do not divide into the {parts} parts of the "
            f"axis of contexts {asked}, and arrays on JAX have no parts of other sizes: pad sequences to a multiple of "
            f"{parts}, and mask what is padded"
        )
    if not isinstance(x, jax.core.Tracer):  # it lies as the batch was placed
        return x
    dims = [axes if dim == 1 else PartitionSpec.UNCONSTRAINED for dim in range(x.ndim)]
    cut = jax.lax.with_sharding_constraint(x, layouts.named(distribution.device_mesh.backend_mesh, *dims))
    if (mask := get_keras_mask(x)) is not None:
        set_keras_mask(cut, mask)
    return cut


def _axes_of_places(array: Any, distribution: Any) -> Axes:
    """Returns the axes that cut an array's places: none where it has no places, or they do not divide."""
    axes = adopt(distribution).strategy.context_axes
    if not _has_places(array, distribution):
        return ()
    return () if array.shape[1] % layouts.places(distribution.device_mesh.backend_mesh, axes) else axes


def _has_places(array: Any, distribution: Any) -> bool:
    is_float = bool(jnp.issubdtype(array.dtype, jnp.inexact))
    return adopt(distribution).strategy.cuts_places(tuple(array.shape), is_float)
