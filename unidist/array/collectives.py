"""The collectives on a DistributedArray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.algebra.checks import whole_number
from unidist.algebra.layout import State
from unidist.array.conversion import as_mesh
from unidist.array.distributed_array import DistributedArray
from unidist.backends import registry
from unidist.errors import LayoutError

_NO_DIM: Any = object()
_mesh_in_use: Callable[[], Mesh | None] | None = None


def set_mesh_in_use(find: Callable[[], Mesh | None]) -> None:
    """Sets where the mesh of the strategy in use is found. This room knows of no strategies."""
    global _mesh_in_use
    _mesh_in_use = find


def all_reduce(x: DistributedArray, axis: str | Axes | None = None) -> DistributedArray:
    """Reduces P -> I: every rank of the group gets the reduced value. No axis: all partial axes.

    Args:
        x: partial over every given axis.
        axis: a mesh axis or several; None: all axes over which x is partial, and x itself where there is none.

    Returns:
        An array of x's shape, with shards of the shapes of x's.

    A max or min is NaN where a contribution is NaN, as NumPy's are. Frameworks' own collectives lose NaN: floats are
    reduced in parts that are then joined, which sends as many bytes.

    Adjoint: the retyping I -> F of the gradient (free). Bytes per rank: 2(n-1)/n of the local tensor.

    Raises:
        LayoutError: x is not partial over an axis.
        MeshError: the mesh has no such axis.
        DesyncError: another rank came to something else.
        ProcessLostError: another process has ended, or did not come within the world's timeout.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> mesh, partial = unidist.Mesh({"data": 2}), unidist.Layout(partial="data")
        >>> x = unidist.from_local([np.array([1.0]), np.array([10.0])], mesh, partial)
        >>> unidist.all_reduce(x, "data").shards()
        {0: array([11.]), 1: array([11.])}
    """
    if axis is None:
        axis = _known(x, "all_reduce").layout.partial_axes
    return x if isinstance(axis, tuple | list) and not axis else _moved(x, axis, "all_reduce", "P", "I")


def reduce_scatter(x: DistributedArray, axis: str | Axes, dim: int) -> DistributedArray:
    """P -> S(dim): every rank of the group gets its part of the reduced value; NaN as of all_reduce.

    Args:
        x: partial over the axis.
        axis: a mesh axis or several, major first.
        dim: the tensor dimension to cut; axes that cut it already stay its major ones.

    Returns:
        An array of x's shape. A shard has one n-th of x's along `dim`, in torch.chunk's sizes.

    Adjoint: all_gather S(dim) -> F. Bytes per rank: (n-1)/n of the local tensor.

    Raises:
        LayoutError: x is not partial over an axis, or has no such dim.
        MeshError, DesyncError, ProcessLostError: as of all_reduce.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> mesh, partial = unidist.Mesh({"data": 2}), unidist.Layout(partial="data")
        >>> x = unidist.from_local([np.array([1.0, 2.0]), np.array([10.0, 20.0])], mesh, partial)
        >>> unidist.reduce_scatter(x, "data", dim=0).shards()
        {0: array([11.]), 1: array([22.])}
    """
    return _moved(x, axis, "reduce_scatter", "P", "S", dim)


def all_gather(x: DistributedArray, axis: str | Axes) -> DistributedArray:
    """S -> I: every rank of the group gets the joined value.

    Args:
        x: sharded over the axis.
        axis: one axis, or several in the order of the dim that they cut.

    Returns:
        An array of x's shape. A shard is the group's shards of x, joined along the dim that the axis cut.

    Adjoint: slice I -> S of the gradient (free). Bytes per rank: (n-1)/n of the joined tensor.

    Raises:
        LayoutError: x is not sharded over an axis, or axes come in another order than the dim is cut by them.
        MeshError, DesyncError, ProcessLostError: as of all_reduce.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> x = unidist.distribute(np.arange(4), unidist.Mesh({"data": 2}), ("data",))
        >>> unidist.all_gather(x, "data").shards()[1].tolist()
        [0, 1, 2, 3]
    """
    return _moved(x, axis, "all_gather", "S", "I")


def all_to_all(x: DistributedArray, axis: str | Axes, dim: int) -> DistributedArray:
    """S(i) -> S(dim): the cut moves from one dim to another.

    Args:
        x: sharded over the axis along another dim.
        axis: a mesh axis, or several that cut one dim.
        dim: the dim to be cut instead.

    Returns:
        An array of x's shape. A shard is n times as long as x's along the dim of before, and one n-th along `dim`.

    Adjoint: all_to_all S(dim) -> S(i). Bytes per rank: (n-1)/n of the local tensor.

    Raises:
        LayoutError: x is not sharded over an axis, or has no such dim.
        MeshError, DesyncError, ProcessLostError: as of all_reduce.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> x = unidist.distribute(np.arange(4).reshape(2, 2), unidist.Mesh({"data": 2}), ("data",))
        >>> x.shards()[0].tolist(), unidist.all_to_all(x, "data", dim=1).shards()[0].tolist()
        ([[0, 1]], [[0], [2]])
    """
    return _moved(x, axis, "all_to_all", "S", "S", dim)


def broadcast(x: DistributedArray, axis: str | Axes | None, root: int) -> DistributedArray:
    """I -> I: replicas that may differ become those of the root.

    Args:
        x: not sharded or partial over the axis.
        axis: a mesh axis or several; None: all.
        root: the place along the axis (row-major over several) whose values count.

    Returns:
        An array of x's shape and layout.

    Adjoint: the gradient goes to the root, zeros elsewhere; over axes fanned out, where each rank has a contribution,
    their sum does (an all_reduce). Bytes per rank: (n-1)/n of the local tensor.

    Raises:
        LayoutError: x is sharded or partial over an axis, or there is no such place.
        MeshError, DesyncError, ProcessLostError: as of all_reduce.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> x = unidist.from_local([np.zeros(1), np.ones(1)], unidist.Mesh({"data": 2}), None)
        >>> unidist.broadcast(x, "data", root=1).shards()
        {0: array([1.]), 1: array([1.])}
    """
    axes = _known(x, "broadcast").mesh.check_axes(axis)
    for name in axes:
        if x.layout.state(name) in ("S", "P"):
            raise LayoutError(f"broadcast over {name!r}: the array is {x.layout}; gather or reduce it first")
    size = x.mesh.axis_size(axes)
    place = whole_number(root)
    if place is None or not 0 <= place < size:
        raise LayoutError(f"broadcast over {axes}: root {root!r} is not a place of 0..{size - 1}")
    return x.broadcast(axes, place)


def permute(x: DistributedArray, axis: str | Axes, pairs: Sequence[tuple[int, int]]) -> DistributedArray:
    """Shards move along the axis; places that receive none hold zeros.

    Args:
        x: any layout whose shards have one shape along the axis.
        axis: a mesh axis or several.
        pairs: (source, destination) places along the axis; each source and each destination at most once.

    Returns:
        An array of x's shape and layout.

    Adjoint: the pairs reversed. Bytes per rank: the local tensor.

    Raises:
        LayoutError: a place out of range or named twice, or shards of different sizes.
        MeshError, DesyncError, ProcessLostError: as of all_reduce.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> x = unidist.distribute(np.array([1.0, 2.0]), unidist.Mesh({"data": 2}), ("data",))
        >>> unidist.permute(x, "data", [(0, 1)]).shards()
        {0: array([0.]), 1: array([1.])}
    """
    axes = _known(x, "permute").mesh.check_axes(axis)
    size, moves = x.mesh.axis_size(axes), _moves(pairs, axes)
    for name, places in (("source", [s for s, _ in moves]), ("destination", [d for _, d in moves])):
        if len(set(places)) != len(places) or any(not 0 <= p < size for p in places):
            raise LayoutError(
                f"permute over {axes}: each {name} must be a place of 0..{size - 1}, once; found {places}"
            )
    for rank in () if x.sharding.is_even else x.mesh.devices:
        if len({x.sharding.local_shape(r) for r in x.mesh.group(axes, rank).ranks}) > 1:
            raise LayoutError(f"permute over {axes}: the shards of shape {x.shape} under {x.layout} differ in size")
    return x.permute(axes, moves)


def _moves(pairs: Any, axes: Axes) -> tuple[tuple[int, int], ...]:
    try:
        given = [(whole_number(source), whole_number(destination)) for source, destination in pairs]
    except (TypeError, ValueError):
        given = [(None, None)]
    moves = tuple((source, destination) for source, destination in given if None not in (source, destination))
    if len(moves) < len(given):
        raise LayoutError(f"permute over {axes}: give pairs of places, as [(0, 1), (1, 0)], found {pairs!r}")
    return moves  # type: ignore[return-value]  # no None is left


def _known(x: Any, what: str) -> DistributedArray:
    if not isinstance(x, DistributedArray):
        raise LayoutError(
            f"{what} takes a DistributedArray, found {type(x).__name__}: make one with unidist.distribute or from_local"
        )
    return x


def barrier(axis: str | Axes | None = None, mesh: Any = None) -> None:
    """Returns when every process of the group has come.

    Args:
        axis: the axes along which to wait; None: all.
        mesh: the mesh; None: with an axis that of the strategy in use, else the whole world.

    Raises:
        LayoutError: an axis without a mesh, and no strategy is in use; a mesh in the place of an axis.
        BackendNotAvailableError: no backend is in use.
        MeshError, DesyncError, ProcessLostError: as of all_reduce.

    Example:
        >>> import unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> unidist.barrier()
    """
    if isinstance(axis, Mesh):
        raise LayoutError(f"barrier({axis!r}): an axis was expected, found a mesh: write barrier(mesh=mesh)")
    backend = registry.current()
    grid = None if mesh is None else as_mesh(mesh)
    if grid is None and axis is not None and _mesh_in_use is not None:
        grid = _mesh_in_use()
    if grid is not None:
        backend.barrier(grid, grid.check_axes(axis))
    elif axis is None:
        backend.barrier()
    else:
        raise LayoutError(
            f"barrier over axis {axis!r}: give the mesh that has it, as barrier({axis!r}, mesh=mesh), or call it in "
            "the scope of a strategy"
        )


def _moved(
    x: DistributedArray, axis: Any, what: str, state: State, new_state: State, dim: Any = _NO_DIM
) -> DistributedArray:
    sharding, number = _known(x, what).sharding, None
    if not isinstance(axis, str):
        axis = sharding.mesh.check_axes(axis)
    if dim is not _NO_DIM:
        number = whole_number(dim)
        if number is None:
            raise LayoutError(f"{what}: dim must be a whole number, found {dim!r}")
    return x._at(_target(sharding, axis, what, state, new_state, number))


@lru_cache(maxsize=4096)
def _target(
    sharding: Sharding, axis: str | Axes, what: str, state: State, new_state: State, dim: int | None = None
) -> Sharding:
    """Returns the sharding that a collective leads to: the axes, all in `state`, put into the other one.

    Worked out once for each kind of array, so that a call costs a look-up.
    """
    mesh, layout = sharding.mesh, sharding.layout
    axes = mesh.check_axes(axis)
    words = {"P": "partial", "S": "sharded"}[state]
    for name in axes:
        if layout.state(name) != state:
            raise LayoutError(f"{what} over {name!r}: the array must be {words} there, but it is {layout}")
    if what == "all_gather":
        _check_order(layout, axes)
    if dim is not None:
        ndim = len(sharding.shape)
        if not -ndim <= dim < ndim:
            raise LayoutError(f"dim {dim} is out of range for shape {sharding.shape}")
        dim %= ndim
    return sharding.with_layout(layout.with_axis(axes, new_state, dim=dim))


def _check_order(layout: Layout, axes: Axes) -> None:
    dims = {layout.dim_of(axis) for axis in axes}
    if len(dims) == 1:
        held = layout.dim_axes(dims.pop() or 0)
        if tuple(axis for axis in held if axis in axes) != axes:
            raise LayoutError(f"all_gather over {axes}: the dim is cut by {held}, name them in that order")
