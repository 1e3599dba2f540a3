"""torch's own mesh and placements, for programs that also use DTensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from unidist.algebra import Group, Mesh, Sharding
from unidist.backends.torch.transports import Transport
from unidist.errors import CapabilityError

if TYPE_CHECKING:  # A second to import, for the few that ask for placements.
    from torch.distributed.tensor.placement_types import Placement

_NAMES = {"sum": "sum", "mean": "avg", "max": "max", "min": "min", "prod": "product"}


@dataclass(frozen=True)
class NativeLayout:
    """Holds what DTensor.from_local and distribute_tensor take, from a Sharding.

    Attributes:
        sharding: whose layout this is.
        device_mesh: torch's mesh.
    """

    sharding: Sharding
    device_mesh: DeviceMesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis: Shard, Partial, or Replicate for both I and F.

        Raises:
            CapabilityError: a dim is cut by several axes in another order than the mesh's. DTensor always cuts by the
                mesh's major axis first, so plain placements would name other rows.
        """
        layout, mesh = self.sharding.layout, self.sharding.mesh
        for dim, axes in enumerate(layout.dims):
            native = tuple(axis for axis in mesh.axis_names if axis in axes)
            if axes != native:
                raise CapabilityError(
                    f"DTensor has no placements for dim {dim} cut by {axes} on {mesh}: it cuts by {native}. "
                    f"Redistribute to Layout with {native} there first"
                )
        return tuple(self._placement(axis) for axis in mesh.axis_names)

    def _placement(self, axis: str) -> Placement:
        from torch.distributed.tensor import Partial, Replicate, Shard

        layout = self.sharding.layout
        dim, op = layout.dim_of(axis), layout.op_of(axis)
        if dim is not None:
            return Shard(dim)
        return Replicate() if op is None else Partial(_NAMES[op])


def device_mesh(mesh: Mesh, rank: int, device_type: str, transports: Callable[[Group], Transport]) -> DeviceMesh:
    """Returns torch's mesh over our process groups, whose members are in the order of the mesh.

    (A DeviceMesh that makes its groups itself sorts the ranks of each, and DTensor's collectives on it then join
    shards in another order than its own coordinates.)
    """
    groups = [transports(mesh.group(axis, rank)).pg for axis in mesh.axis_names]
    ranks = torch.tensor(mesh.devices, dtype=torch.int).view(mesh.shape)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=mesh.axis_names)
