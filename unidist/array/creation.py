"""Says how a DistributedArray is made: of a whole value, or of this process's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unidist.algebra import Layout, Mesh, Sharding
from unidist.array.conversion import as_layout, as_mesh
from unidist.array.distributed_array import DistributedArray, check_reductions
from unidist.backends import registry
from unidist.backends.protocol import dtype_name, plain_array
from unidist.errors import LayoutError


def distribute(value: Any, mesh: Any, layout: Any = None) -> DistributedArray:
    """Spreads a value that every process holds in full.

    Args:
        value: the full array, the same on every process: a framework's, NumPy's, or what NumPy makes one of.
        mesh: a Mesh or Keras DeviceMesh.
        layout: a Layout, tuple or TensorLayout. Uneven dims get torch.chunk's sizes, axis by axis, major first;
            a partial axis gets the value at place 0 and neutral elements elsewhere.

    Returns:
        An array of the value's shape and dtype.

    Raises:
        LayoutError: the layout does not fit the mesh, the shape or the dtype.
        MeshError: the mesh does not fit the world, or is none.
        CapabilityError: the backend does not move this dtype or has no such reduction.
        BackendNotAvailableError: no backend is in use.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> x = unidist.distribute(np.arange(5), unidist.Mesh({"data": 2}), ("data",))
        >>> {rank: shard.tolist() for rank, shard in x.shards().items()}
        {0: [0, 1, 2], 1: [3, 4]}
    """
    backend = registry.current()
    sharding = Sharding(as_mesh(mesh), as_layout(layout), _shape(value))
    check_reductions(sharding.layout, None if not hasattr(value, "dtype") else dtype_name(value), backend)
    return DistributedArray(backend.distribute(value, sharding), sharding, backend)


def from_local(
    shards: Sequence[Any], mesh: Any, layout: Any, *, shape: Sequence[int] | None = None
) -> DistributedArray:
    """Assembles a distributed array from this process's shards.

    Args:
        shards: one array for each rank of this process, in rank order.
        mesh: a Mesh or Keras DeviceMesh.
        layout: what the shards are of the whole.
        shape: the global shape, needed where shards are uneven.

    Returns:
        An array of that shape. Without it a dim is as long as the shards' times the places of the axes that cut it.

    Raises:
        LayoutError: too few or many shards, or one that has not the shape that the layout gives its rank.
        MeshError: the mesh does not fit the world, or is none.
        CapabilityError: the backend does not move this dtype or has no such reduction.
        BackendNotAvailableError: no backend is in use.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> mesh = unidist.Mesh({"data": 2})
        >>> x = unidist.from_local([np.zeros(2), np.ones(1)], mesh, ("data",), shape=(3,))
        >>> x.numpy()
        array([0., 0., 1.])
    """
    backend = registry.current()
    grid, lay = as_mesh(mesh), as_layout(layout)
    sharding = Sharding(grid, lay, tuple(shape) if shape is not None else _even_shape(shards, grid, lay))
    found = DistributedArray(backend.from_local(list(shards), sharding), sharding, backend)
    check_reductions(lay, found.dtype, backend)
    return found


def _even_shape(shards: Sequence[Any], mesh: Mesh, layout: Layout) -> tuple[int, ...]:
    shapes = {_shape(shard) for shard in shards}
    if len(shapes) != 1:
        raise LayoutError(f"from_local: shards of shapes {sorted(shapes)} do not tell the global shape: give shape=")
    local = shapes.pop()
    layout.check(mesh, len(local))
    return tuple(n * mesh.axis_size(layout.dim_axes(dim)) for dim, n in enumerate(local))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") else plain_array(value).shape
