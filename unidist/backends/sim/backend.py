"""The `sim` backend: virtual devices in one process, NumPy arrays, one shard a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, Redistribution, Sharding, redistribution
from unidist.backends.environment import detect
from unidist.backends.protocol import ALL_DTYPES, Array, Capabilities, Cluster, DistributionBackend, plain_array
from unidist.backends.sim import reference
from unidist.backends.sim.reference import Shards
from unidist.backends.traffic import report, report_steps
from unidist.backends.validation import check_dtype, check_local_shape, check_one_dtype, check_ranks, check_whole_shape
from unidist.errors import BackendMismatchError, LayoutError, MeshError

DEFAULT_DEVICES = 8


class SimBackend(DistributionBackend):
    """Virtual devices in this process. Data: a mapping rank -> NumPy array.

    Args:
        devices: how many, or their names; default 8.
    """

    name: ClassVar[str] = "sim"
    capabilities: ClassVar[Capabilities] = Capabilities(
        view="local", dtypes=ALL_DTYPES, differentiable=False, processes=False
    )

    def __init__(self, devices: int | Sequence[str] | None = None) -> None:
        names = devices if devices is not None else DEFAULT_DEVICES
        self._devices = [f"cpu:{k}" for k in range(names)] if isinstance(names, int) else list(names)
        if not self._devices:
            raise MeshError("sim needs at least one device: use('sim', devices=4)")
        if len(set(self._devices)) != len(self._devices):
            raise MeshError(f"sim: a device is named twice in {self._devices}")

    def initialize(self, cluster: Cluster) -> None:
        launch = detect()
        count = cluster.process_count or (launch.process_count if launch is not None else 1)
        if count > 1:
            raise BackendMismatchError(
                f"sim runs all its devices in one process, but a launcher or initialize() asked for {count}: "
                "start the script with plain python, or use('torch') or use('jax')"
            )

    def shutdown(self) -> None:
        """Nothing is held."""

    def process_index(self) -> int:
        return 0

    def process_count(self) -> int:
        return 1

    def list_devices(self, kind: str | None = None) -> list[str]:
        return [name for name in self._devices if kind is None or name.split(":")[0] == kind]

    def torch_device(self) -> str:
        """Virtual ranks are threads on CPUs, also where there are GPUs."""
        return "cpu"

    def local_ranks(self) -> tuple[int, ...]:
        return tuple(range(len(self._devices)))

    def mesh(self, mesh: Mesh) -> Mesh:
        check_ranks(mesh, "sim", len(self._devices), "use('sim', devices={needed})")
        return mesh

    def layout(self, sharding: Sharding) -> Sharding:
        return sharding

    def distribute(self, value: Any, sharding: Sharding) -> Shards:
        self.mesh(sharding.mesh)
        whole = self._checked(plain_array(value))
        check_whole_shape(whole.shape, sharding)
        return reference.distribute(whole, sharding)

    def from_local(self, shards: Sequence[Any], sharding: Sharding) -> Shards:
        self.mesh(sharding.mesh)
        ranks = sorted(sharding.mesh.devices)
        if len(shards) != len(ranks):
            raise LayoutError(f"the mesh has ranks {ranks}: give {len(ranks)} shards, found {len(shards)}")
        out = {rank: self._checked(np.array(plain_array(shard))) for rank, shard in zip(ranks, shards, strict=True)}
        for rank, shard in out.items():
            check_local_shape(shard.shape, sharding, rank)
        check_one_dtype(out.values())
        return out

    def to_local(self, x: Shards, sharding: Sharding) -> Mapping[int, Array]:
        return {rank: shard.copy() for rank, shard in sorted(x.items())}

    def gather(self, x: Shards, sharding: Sharding) -> Array:
        self._tell_steps(redistribution(sharding, sharding.with_layout(Layout())), x)
        return reference.gather(x, sharding)

    def redistribute(self, x: Shards, src: Sharding, dst: Sharding) -> Shards:
        moves = redistribution(src, dst)
        self._tell_steps(moves, x)
        return reference.run(moves, x)

    def broadcast(self, x: Shards, sharding: Sharding, axes: Axes, root: int) -> Shards:
        self._tell("broadcast", axes, sharding, x)
        return reference.broadcast(x, sharding, axes, root)

    def permute(self, x: Shards, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> Shards:
        self._tell("permute", axes, sharding, x)
        return reference.permute(x, sharding, axes, pairs)

    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        """All virtual devices are here already."""

    def _checked(self, value: Array) -> Array:
        check_dtype(self, value.dtype.name)
        return value

    # the ledger sees what the lowest rank of the mesh sends ----------------------------------------------------

    def _tell_steps(self, moves: Redistribution, x: Shards) -> None:
        if events.listening():
            rank = min(x)
            report_steps(moves, rank, x[rank].itemsize)

    def _tell(self, op: str, axes: Axes, sharding: Sharding, x: Shards) -> None:
        if events.listening():
            rank = min(x)
            report(op, axes, sharding.mesh.group(axes, rank), x[rank].nbytes)
