"""The `horovod` backend: Horovod, one process a device, one shard a process."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Literal

from unidist import events
from unidist.algebra import Axes, Group, Mesh, Sharding, Step
from unidist.backends import environment
from unidist.backends.collectives import Collectives
from unidist.backends.ending import has_failed
from unidist.backends.horovod.comm import HorovodComm
from unidist.backends.horovod.joining import Membership, join, leave
from unidist.backends.horovod.sets import HorovodMesh, ProcessSets
from unidist.backends.joining import joined_already
from unidist.backends.local import Both, LocalViewBackend
from unidist.backends.protocol import ALL_DTYPES, Capabilities, Cluster
from unidist.backends.validation import too_few
from unidist.errors import (
    BackendNotAvailableError,
    CapabilityError,
    DesyncError,
    ProcessLostError,
)
from unidist.flight.recorder import recorder

Framework = Literal["torch", "tensorflow"]
# How long a program that is over waits for the others to come to their ends.
PARTING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class HorovodLayout:
    """Horovod has no layouts: the sharding, and the process sets that it moves over."""

    sharding: Sharding
    mesh: HorovodMesh


class HorovodBackend(LocalViewBackend[Any]):
    """Horovod over Gloo, for arrays on CPU.

    Data: this process's shard, a torch.Tensor or an eager tf.Tensor.

    Under horovodrun or `unidist run --backend horovod` the world is the launcher's. At an address (of
    unidist.initialize, or Slurm's) process 0 serves Horovod's rendezvous. A program that has called
    hvd.init(process_sets="dynamic") itself keeps its world. Without any of these this process is a world of one.

    Gradients are unidist's own: the adjoints of redistributions. (Horovod's own backward of allgather and broadcast
    gives 1/n of the gradient, that of reducescatter n times.) Horovod reports a process that ends; one that
    is alive and does not come to a collective is reported after `timeout` seconds.

    Args:
        devices: how many devices the program is written for, or their names ("cpu:0"...). The world must have as many
            processes.
        framework: "torch" or "tensorflow", whose arrays are moved. None: what Keras runs on (KERAS_BACKEND), else
            torch.
        timeout: seconds that a collective waits for the others. None: what unidist.initialize says, 300 by default.

    Raises:
        BackendNotAvailableError: Horovod was built without the framework.
        CapabilityError: devices that are not CPUs, or a framework that is neither.
    """

    name: ClassVar[str] = "horovod"
    more_devices: ClassVar[str] = (
        "devices here are processes. Start {needed}: `unidist run --backend horovod -n {needed} script.py` or "
        "`horovodrun -np {needed} python script.py`"
    )
    capabilities: ClassVar[Capabilities] = Capabilities(view="local", uneven="native", dtypes=ALL_DTYPES)

    comm: HorovodComm[Any]

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        *,
        framework: Framework | None = None,
        timeout: float | None = None,
    ) -> None:
        self._asked = devices
        self._timeout = timeout
        _check_devices(devices)
        self.framework: Framework = framework or _framework()
        self._side = _side(self.framework)
        self._hvd: Any = self._side.hvd
        self.ops = self._side.make_ops()
        self._world: Membership | None = None
        self._has_joined = False
        self._sets: ProcessSets | None = None
        self.comm = self._side.make_comm(self._transport, environment.timeout())

    # the world ------------------------------------------------------------------------------------------------

    def initialize(self, cluster: Cluster) -> None:
        if self._has_joined:
            raise joined_already(self.process_index(), self.process_count())
        self._enter(cluster)
        self._has_joined = True

    def _enter(self, cluster: Cluster) -> None:
        if self._timeout is not None:
            cluster = Cluster(
                address=cluster.address,
                process_count=cluster.process_count,
                process_index=cluster.process_index,
                timeout=self._timeout,
            )
            recorder.set_timeout(self._timeout)
        self._moves.clear()
        self._sets = None
        self._world = join(cluster, self._hvd)
        self.comm = self._side.make_comm(self._transport, self._world.timeout)
        if self._world.is_ours and self._world.size > 1:
            atexit.register(self._part)

    def set_timeout(self, seconds: float) -> None:
        """Changes how long collectives wait.

        HOROVOD_GLOO_TIMEOUT_SECONDS, for a process that is stopped, stays.
        """
        self._world = replace(self.world, timeout=seconds)
        self.comm = self._side.make_comm(self._transport, seconds)
        if self._sets is not None:
            self._sets.timeout = seconds

    def _part(self) -> None:
        """Waits a while for the others at the end of the program.

        The first process to leave ends Horovod for all, also for those that are still in a collective of another group.
        """
        if not has_failed():
            self.comm = self._side.make_comm(self._transport, PARTING_SECONDS)
            # One that comes later than this holds up nobody.
            recorder.set_timeout(math.inf)
            # They tell of it themselves.
            with contextlib.suppress(ProcessLostError, DesyncError), events.for_purpose("the end of the program"):
                self.barrier()

    def shutdown(self) -> None:
        atexit.unregister(self._part)
        self._moves.clear()
        world, self._world, self._sets, self._has_joined = self._world, None, None, False
        if world is not None:
            leave(world, self._hvd)

    @property
    def world(self) -> Membership:
        """The world joined; before that, the one of the program's own hvd.init() or of this process alone."""
        if self._world is None or (not self._has_joined and self._world.size == 1 and self._stale()):
            self._enter(Cluster())
        return self._world  # type: ignore[return-value]

    def _stale(self) -> bool:
        """Returns whether the program initialised Horovod after we took this process for a world of one."""
        return bool(self._hvd.is_initialized()) and self._hvd.size() > 1

    @property
    def rank(self) -> int:
        return self.world.rank

    def process_index(self) -> int:
        return self.world.rank

    def process_count(self) -> int:
        return self.world.size

    def list_devices(self, kind: str | None = None) -> list[str]:
        names = [f"cpu:{k}" for k in range(self.world.size)]
        asked = self._asked
        count = asked if isinstance(asked, int) else len(asked or names)
        if count != len(names):
            raise too_few(f"use('horovod', devices={asked!r})", count, "horovod", len(names), self.more_devices)
        return names if kind is None or kind.lower().partition(":")[0] == "cpu" else []

    def torch_device(self) -> str:
        """Horovod moves CPU tensors here, also where there are GPUs."""
        return "cpu"

    # native objects -------------------------------------------------------------------------------------------

    def mesh(self, mesh: Mesh) -> HorovodMesh:
        """Process sets along the groups of the mesh's axes, made on the first call.

        A collective of the whole world where something is to be made, because Horovod makes a process set with all
        processes. The first move on a mesh calls it; for a mesh of some of the ranks, call it on every process.
        """
        self.check_mesh(mesh)
        if self.world.size == 1:
            return HorovodMesh(mesh, {})
        return self._process_sets().mesh(mesh, self.rank)

    def layout(self, sharding: Sharding) -> HorovodLayout:
        return HorovodLayout(sharding, self.mesh(sharding.mesh))

    def _process_sets(self) -> ProcessSets:
        if self._sets is None:
            self._sets = ProcessSets(self._hvd, self.world.timeout)
        return self._sets

    def _transport(self, group: Group) -> Any:
        return self._process_sets()(group)

    def _prepare(self, mesh: Mesh) -> None:
        """Makes the process sets of a mesh that a move needs, if the mesh is the world: then all come here."""
        self.check_mesh(mesh)
        if mesh.size == self.world.size:
            self.mesh(mesh)

    def resolve(self, step: Step, group: Group, comm: Collectives[Any]) -> Callable[[Any], Any]:
        if step.is_collective:
            self._prepare(step.before.mesh)
        return super().resolve(step, group, comm)

    def broadcasting(self, comm: Collectives[Any], sharding: Sharding, axes: Axes, root: int) -> Both[Any]:
        self._prepare(sharding.mesh)
        return super().broadcasting(comm, sharding, axes, root)

    def permuting(
        self, comm: Collectives[Any], sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]
    ) -> Both[Any]:
        self._prepare(sharding.mesh)
        return super().permuting(comm, sharding, axes, pairs)

    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        if mesh is not None:
            self._prepare(mesh)
        super().barrier(mesh, axes)


def _framework() -> Framework:
    keras: Any = sys.modules.get("keras")
    found = keras.config.backend() if hasattr(keras, "config") else os.environ.get("KERAS_BACKEND", "torch")
    return "tensorflow" if found == "tensorflow" else "torch"


def _side(framework: str) -> ModuleType:
    if framework not in ("torch", "tensorflow"):
        raise CapabilityError(f"use('horovod', framework={framework!r}): Horovod moves arrays of torch and tensorflow")
    if importlib.util.find_spec(framework) is None:
        raise BackendNotAvailableError(f"use('horovod') on {framework} needs {framework}: pip install {framework}")
    try:
        return importlib.import_module(f"unidist.backends.horovod.over_{framework}")
    except ImportError as error:
        raise BackendNotAvailableError(
            f"this Horovod does not work with the {framework} that is installed ({str(error).strip().splitlines()[0]}):"
            " build it again with ci/install_horovod.sh PYTHON (docs/horovod.md)"
        ) from error


def _check_devices(devices: int | Sequence[str] | None) -> None:
    if devices is None or isinstance(devices, int):
        return
    wanted = [f"cpu:{k}" for k in range(len(devices))]
    if [name.lower() for name in devices] != wanted:
        raise CapabilityError(
            f"use('horovod', devices={list(devices)}): this adapter serves CPUs, one a process, in rank order: {wanted}"
        )
