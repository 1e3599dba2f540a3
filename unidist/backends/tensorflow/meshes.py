"""DTensor's meshes of the world's devices: each is made once, and kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tensorflow.experimental import dtensor

from unidist.algebra import Axes, Mesh
from unidist.backends.tensorflow.devices import task_of
from unidist.backends.validation import check_ranks


class Meshes:
    """The meshes of one world, as one of its processes makes them.

    Args:
        devices: TensorFlow's full names; the k-th is rank k.
        index: of this process.
        count: how many processes the world has.
    """

    def __init__(self, devices: tuple[str, ...], index: int, count: int) -> None:
        self._devices = devices
        self._index, self._count = index, count
        self._meshes: dict[Mesh, dtensor.Mesh] = {}
        self._of_groups: dict[tuple[Mesh, Axes], tuple[dtensor.Mesh, tuple[int, ...]]] = {}

    def is_here(self, rank: int) -> bool:
        """Returns whether this process holds a rank."""
        return task_of(self._devices[rank]) == self._index

    def ranks_here(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks that this process holds, in their order."""
        return tuple(rank for rank in ranks if self.is_here(rank))

    def of(self, mesh: Mesh) -> dtensor.Mesh:
        """DTensor's mesh of a mesh.

        Raises:
            MeshError: the mesh names a rank that the world does not have.
        """
        found = self._meshes.get(mesh)
        if found is None:
            remedy = (
                "make the mesh smaller, or on CPU call use('tensorflow', devices={needed}) before any TensorFlow "
                "operation"
            )
            check_ranks(mesh, "tensorflow", len(self._devices), remedy)
            found = self._meshes[mesh] = self._made(mesh.axis_names, mesh.shape, mesh.devices)
        return found

    def of_groups(self, mesh: Mesh, axes: Axes) -> tuple[dtensor.Mesh, tuple[int, ...]]:
        """[groups, places] along axes, and this process's ranks in the order of its local devices.

        The places of a group are in the order of ranks: DTensor's all_to_all misorders what it moves otherwise.
        """
        found = self._of_groups.get((mesh, axes))
        if found is None:
            self.of(mesh)
            groups = sorted(tuple(sorted(group)) for group in mesh.groups(axes))
            ranks = [rank for group in groups for rank in group]
            native = self._made(("o", "g"), (len(groups), len(groups[0])), ranks)
            found = self._of_groups[mesh, axes] = native, self.ranks_here(ranks)
        return found

    def _made(self, names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> dtensor.Mesh:
        here = [place for place, rank in enumerate(ranks) if self.is_here(rank)]
        return dtensor.Mesh(
            list(names),
            np.arange(len(ranks)).reshape(shape),
            here,
            [self._devices[ranks[place]] for place in here],
            global_devices=[self._devices[rank] for rank in ranks] if self._count > 1 else None,
        )
