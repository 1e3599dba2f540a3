"""DistributedArray: a global value, its sharding and the backend's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unidist import names
from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.array.conversion import as_layout
from unidist.backends.protocol import Array, DistributionBackend, dtype_name
from unidist.errors import CapabilityError, LayoutError


class DistributedArray:
    """A value spread over a mesh. Immutable: every operation gives a new one.

    Attributes:
        data: the backend's own array or arrays; `sharding` says what they mean.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> x = unidist.distribute(np.arange(6.0).reshape(2, 3), unidist.Mesh({"data": 2}), ("data",))
        >>> x.shape, x.layout
        ((2, 3), Layout('data'))
        >>> x.shards()[1]
        array([[3., 4., 5.]])
        >>> x.redistribute((None, "data")).shards()[0]
        array([[0., 1.],
               [3., 4.]])
    """

    __slots__ = ("_backend", "data", "sharding")

    def __init__(self, data: Any, sharding: Sharding, backend: DistributionBackend) -> None:
        self.data = data
        self.sharding = sharding
        self._backend = backend

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.sharding.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.sharding.shape)

    @property
    def mesh(self) -> Mesh:
        """The devices that it is spread over."""
        return self.sharding.mesh

    @property
    def layout(self) -> Layout:
        """The layout: the state of the array on each axis of the mesh."""
        return self.sharding.layout

    @property
    def dtype(self) -> str:
        """The dtype's name, as "float32"."""
        return dtype_name(next(iter(self.data.values())) if isinstance(self.data, Mapping) else self.data)

    def __repr__(self) -> str:
        return f"DistributedArray(shape={self.shape}, dtype={self.dtype}, layout={self.layout}, mesh={self.mesh})"

    def _repr_svg_(self) -> str | None:
        return names.shown(self, "svg")

    def shards(self) -> dict[int, Any]:
        """Returns rank -> its native local array, for the ranks of this process.

        Its shape is `sharding.local_shape(rank)`. The simulator's are copies. Torch's are the array's own tensors,
        which gradients flow through: writing to one changes the array.
        """
        return dict(self._backend.to_local(self.data, self.sharding))

    def numpy(self) -> Array:
        """The full value on every process, of `shape`, partial axes reduced. A collective of the whole mesh.

        Raises:
            MeshError: this process holds no rank of the mesh.
            DesyncError, ProcessLostError: as of all_reduce.
        """
        return self._backend.gather(self.data, self.sharding)

    def redistribute(self, layout: Any) -> DistributedArray:
        """The same value in another layout, by the shortest plan; differentiable where the framework is.

        Raises:
            LayoutError: the layout does not fit the mesh, the shape or the dtype.
            CapabilityError: the backend has no such reduction.
            DesyncError, ProcessLostError: as of all_reduce.
        """
        return self._at(self.sharding.with_layout(as_layout(layout)))

    def _at(self, target: Sharding) -> DistributedArray:
        if target.layout.partial:
            check_reductions(target.layout, self.dtype, self._backend)
        return self._with(self._backend.redistribute(self.data, self.sharding, target), target)

    def _with(self, data: Any, sharding: Sharding) -> DistributedArray:
        return DistributedArray(data, sharding, self._backend)

    def broadcast(self, axes: Axes, root: int) -> DistributedArray:
        """As unidist.broadcast, of arguments that it has checked."""
        return self._with(self._backend.broadcast(self.data, self.sharding, axes, root), self.sharding)

    def permute(self, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> DistributedArray:
        """As unidist.permute, of arguments that it has checked."""
        return self._with(self._backend.permute(self.data, self.sharding, axes, pairs), self.sharding)


def check_reductions(layout: Layout, dtype: str | None, backend: DistributionBackend) -> None:
    """Raises where the backend has not the layout's reductions, or where the dtype has no mean."""
    for axis, op in layout.partial:
        if op not in backend.capabilities.reduce_ops:
            raise CapabilityError(
                f"backend {backend.name!r} cannot reduce by {op!r} (axis {axis!r}): "
                f"it has {sorted(backend.capabilities.reduce_ops)}"
            )
        if op == "mean" and dtype is not None and "float" not in dtype:
            raise LayoutError(
                f"{layout} is a mean over {axis!r}, but a mean of {dtype} values is no {dtype}: cast first"
            )
