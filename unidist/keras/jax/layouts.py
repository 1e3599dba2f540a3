"""Layouts between unidist, Keras and JAX: JAX only gets NamedShardings that fit their shapes.

Axes of contexts cut the places of sequences where a batch is placed and where a model's call begins. All else is the
compiler's: which of a model's values stay cut, and how places of other devices are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding, PartitionSpec
from keras.distribution import TensorLayout

from unidist.algebra import Axes, Layout, Sharding
from unidist.errors import LayoutError
from unidist.keras.patching.compat import get_keras_mask, random_seed_dtype, set_keras_mask
from unidist.keras.patching.patches import calling
from unidist.keras.records import variable_record
from unidist.keras.strategies.distribution import adopt
from unidist.keras.strategies.layout_maps import keras_layout
from unidist.strategies import VariableLayouts


def named(mesh: Any, *dims: Any) -> NamedSharding:
    """A NamedSharding on a JAX mesh; without dims the replicated one."""
    return NamedSharding(mesh, PartitionSpec(*dims))


def replicated(distribution: Any) -> NamedSharding:
    return named(distribution.device_mesh.backend_mesh)


def native(layout: Any, distribution: Any) -> NamedSharding:
    """The NamedSharding of a layout that a Distribution gave: a TensorLayout, a Sharding, or one already."""
    if isinstance(layout, Sharding):
        dims = [axes[0] if len(axes) == 1 else axes or None for axes in layout.layout.dims]
        return named(distribution.device_mesh.backend_mesh, *dims)
    found: NamedSharding = layout.backend_layout if isinstance(layout, TensorLayout) else layout
    return found


def of_native(sharding: Any) -> Layout:
    """The Layout of a NamedSharding; of a sharding on one device, the replicated one."""
    return Layout(*sharding.spec) if isinstance(sharding, NamedSharding) else Layout()


def parts_of_dim(sharding: NamedSharding, dim: int) -> int:
    """Into how many parts a sharding cuts a dim."""
    return places(sharding.mesh, of_native(sharding).dim_axes(dim))


def places(mesh: Any, axes: Axes) -> int:
    """Returns how many places some axes of a JAX mesh have together."""
    return prod(mesh.shape[axis] for axis in axes)


@dataclass(frozen=True)
class Placement:
    """Says where a variable rests, where layers use it, and where its gradient and its slots are."""

    storage: NamedSharding
    compute: NamedSharding
    state: NamedSharding


def placement(variable: Any, distribution: Any) -> Placement:
    """The three layouts of a placed variable. Where all are one, that is where it rests."""
    rests = native(variable._layout, distribution) if variable._layout is not None else replicated(distribution)
    found, shape = layouts_of(variable, distribution), tuple(variable.shape)
    if found == variable_record.alike(found.storage):
        return Placement(rests, rests, rests)
    compute, state = (native(of_keras(x, shape, distribution), distribution) for x in (found.compute, found.state))
    return Placement(rests, compute, state)


def layouts_of(variable: Any, distribution: Any) -> VariableLayouts:
    """Returns how a variable is laid out on a distribution, or would.

    Raises:
        LayoutError: two rules match its path, or a dim does not divide; for Keras's own strategies too.
    """
    record = variable_record.of(variable)
    if record.lies_on(distribution) and record.layouts is not None:
        return record.layouts
    is_weight = not variable_record.is_state_of_metric(variable) and str(variable.dtype) != random_seed_dtype()
    return variable_record.layouts_of(variable, distribution, is_weight=is_weight)


def of_keras(layout: Layout, shape: tuple[int, ...], distribution: Any) -> Any:
    """A layout in a form that Keras's variables take."""
    found = keras_layout(layout, shape, adopt(distribution).mesh, distribution.device_mesh)
    return native(found, distribution) if isinstance(found, Sharding) else found


def of_rows(shape: tuple[int, ...], distribution: Any) -> NamedSharding:
    """Returns how an array of a batch is laid out. Its first dim need not divide, the others must.

    Raises:
        LayoutError: another dim than the first does not divide over its axes.
    """
    sharding = native(distribution.get_data_layout(shape), distribution)
    for dim in range(1, len(shape)):
        parts = parts_of_dim(sharding, dim)
        if shape[dim] % parts:
            raise LayoutError(
                f"an input of shape {shape}: dim {dim} ({shape[dim]}) does not divide into the {parts} parts of its "
                f"layout {of_native(sharding)}: pad it, or shard another dim"
            )
    return sharding


@calling
def constraining(original: Any, tensor: Any, layout: Any) -> Any:
    """Wraps Keras's distribute_tensor, whose constraint JAX refuses on a dim that is cut unevenly.

    Such are the rows of a ragged batch. The compiler then chooses for that dim alone.
    """
    if not isinstance(tensor, jax.core.Tracer):
        return original(tensor, layout)
    sharding = layout.backend_layout if isinstance(layout, TensorLayout) else layout
    if not isinstance(sharding, NamedSharding):
        return original(tensor, layout)
    uneven = [dim for dim, size in enumerate(tensor.shape) if size % parts_of_dim(sharding, dim)]
    if not uneven:
        return original(tensor, layout)
    spec = [*sharding.spec, *[None] * (tensor.ndim - len(sharding.spec))]
    dims = [PartitionSpec.UNCONSTRAINED if dim in uneven else axes for dim, axes in enumerate(spec)]
    return original(tensor, named(sharding.mesh, *dims))


def of_batch(array: Any, distribution: Any) -> NamedSharding:
    """Returns how an array of a batch is laid out: its rows, and its places where these divide.

    Raises:
        LayoutError: another dim than the first does not divide over its axes.
    """
    sharding = of_rows(array.shape, distribution)
    axes = _axes_of_places(array, distribution)
    if not axes or parts_of_dim(sharding, 1) > 1:
        return sharding
    return named(sharding.mesh, of_native(sharding).dim_axes(0) or None, axes)


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
        parts = places(distribution.device_mesh.backend_mesh, asked)
        raise LayoutError(
            f"an input of shape {x.shape}: its {x.shape[1]} places (dim 1) do not divide into the {parts} parts of the "
            f"axis of contexts {asked}, and arrays on JAX have no parts of other sizes: pad sequences to a multiple of "
            f"{parts}, and mask what is padded"
        )
    if not isinstance(x, jax.core.Tracer):  # it lies as the batch was placed
        return x
    dims = [axes if dim == 1 else PartitionSpec.UNCONSTRAINED for dim in range(x.ndim)]
    cut = jax.lax.with_sharding_constraint(x, named(distribution.device_mesh.backend_mesh, *dims))
    if (mask := get_keras_mask(x)) is not None:
        set_keras_mask(cut, mask)
    return cut


def _axes_of_places(array: Any, distribution: Any) -> Axes:
    axes = adopt(distribution).strategy.context_axes
    if not _has_places(array, distribution):
        return ()
    return () if array.shape[1] % places(distribution.device_mesh.backend_mesh, axes) else axes


def _has_places(array: Any, distribution: Any) -> bool:
    is_float = bool(jnp.issubdtype(array.dtype, jnp.inexact))
    return adopt(distribution).strategy.cuts_places(tuple(array.shape), is_float)
