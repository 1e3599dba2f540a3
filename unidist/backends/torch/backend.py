"""The `torch` backend: torch.distributed, one process a device, one shard a process."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from unidist import events
from unidist.algebra import Axes, Group, Mesh, Sharding, redistribution
from unidist.backends import environment
from unidist.backends.ending import has_failed
from unidist.backends.joining import joined_already
from unidist.backends.local import Both, LocalViewBackend, Move
from unidist.backends.protocol import ALL_DTYPES, Array, Capabilities, Cluster
from unidist.backends.torch import accelerators, native, tracing
from unidist.backends.torch.accelerators import DeviceType
from unidist.backends.torch.buffers import BufferedCollectives
from unidist.backends.torch.calling import Under
from unidist.backends.torch.comm import TorchComm
from unidist.backends.torch.joining import Membership, alone, join, retimed
from unidist.backends.torch.ops import TorchOps
from unidist.backends.torch.primitives import Traced, arrived, begin
from unidist.backends.torch.transports import Transports
from unidist.backends.torch.watch import Watch, can_watch
from unidist.backends.validation import too_few
from unidist.errors import BackendNotAvailableError, CapabilityError, MeshError

TensorKind: TypeAlias = Literal["native", "dtensor"]


class TorchBackend(LocalViewBackend[torch.Tensor]):
    """torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors. Data: the process's shard, a Tensor.

    Under torchrun, srun or `unidist run` the world is the launcher's; a process group that is already there is used
    and left alive; without either this process is a world of one, which needs no network.

    Reductions are exact where their values are; else gloo's are summed in rank order by reduce_scatter and small
    all_reduces, and in a fixed order that depends on the size by others. Every rank gets the same bits. On CUDA the
    order is NCCL's, and NCCL's watchdog reports a lost peer and ends the process. UNIDIST_TORCH_TRANSPORT=gloo
    sends CUDA tensors over the host, so that several ranks can be tried on one GPU. (It has never run on GPUs.)

    Args:
        devices: how many devices the program is written for, or their names. The world must have as many processes.
            The kind in the names ("cpu:0", "gpu:0") chooses the devices; by default CUDA's where there are any.
        tensor: what a Keras model's `state_dict()` holds: "native", each process's shards as plain tensors, or
            "dtensor", DTensors on them, for torch.distributed.checkpoint. Computing is native in both.

    Raises:
        CapabilityError: another kind of tensor.
    """

    name: ClassVar[str] = "torch"
    more_devices: ClassVar[str] = (
        "devices here are processes. Start {needed}: `unidist run -n {needed} script.py` or "
        "`torchrun --nproc-per-node {needed} script.py`"
    )
    capabilities: ClassVar[Capabilities] = Capabilities(view="local", uneven="native", dtypes=ALL_DTYPES)

    has_dtensors: ClassVar[bool] = True

    comm: TorchComm

    def __init__(self, devices: int | Sequence[str] | None = None, *, tensor: TensorKind = "native") -> None:
        if tensor not in get_args(TensorKind):
            raise CapabilityError(f"use('torch', tensor={tensor!r}): there are {' and '.join(get_args(TensorKind))}")
        self.tensor: TensorKind = tensor
        self._asked = devices
        self._device_type = _device_type(devices)
        self._world: Membership | None = None
        self._has_joined = False
        self._meshes: dict[Mesh, Any] = {}
        self._numbers: dict[Hashable, int] = {}
        self._is_tracing = False
        self._sent: list[events.Event] = []
        self.ops = TorchOps()
        self._transports = Transports(environment.timeout())
        self._watch: Watch | None = None
        self.comm = TorchComm(self._transports)  # of the world of one, until another is joined
        self._traced = self.comm

    @property
    def compiles(self) -> bool:  # type: ignore[override]  # of a class elsewhere
        """Functional collectives are NCCL's on CUDA tensors: what goes over the host is no part of a program."""
        return self.world.device.type == "cpu" or not accelerators.goes_by_host()

    # the world ------------------------------------------------------------------------------------------------

    def initialize(self, cluster: Cluster) -> None:
        if self._has_joined:
            raise joined_already(self.process_index(), self.process_count())
        if self._world is not None and self._world.is_ours and dist.is_initialized():
            self.shutdown()  # the group of a world of one, made for a native mesh
        self._enter(join(cluster, self._device_type))
        self._has_joined = True

    def _enter(self, world: Membership) -> None:
        self._forget()
        self._world = world
        self.ops = TorchOps(world.device)
        self._transports = Transports(world.timeout)
        self._watch = Watch(world.rank, self._transports) if world.size > 1 and can_watch() else None
        self.comm = TorchComm(self._transports, watch=self._watch)
        self._traced = TorchComm(self._transports, BufferedCollectives(Traced()))
        if self._uses_nccl and world.is_ours:
            atexit.register(self._part)

    @property
    def _uses_nccl(self) -> bool:
        world = self._world
        return world is not None and world.size > 1 and world.device.type == "cuda" and not accelerators.goes_by_host()

    def _part(self) -> None:
        """Gives NCCL's communicators back at the program's end; amid a failure the others do not come."""
        if not has_failed():
            self.shutdown()

    def ready(self, group: Group) -> None:
        if self._uses_nccl:
            self.comm.all_reduce(torch.zeros(1, device=self.world.device), group, "sum")

    def set_timeout(self, seconds: float) -> None:
        """Changes how long collectives wait, in the groups that are made already too."""
        self._world = retimed(self.world, seconds)
        self._transports.set_timeout(seconds)

    def _forget(self) -> None:
        self._moves.clear()
        self._meshes.clear()
        self._numbers.clear()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def shutdown(self) -> None:
        atexit.unregister(self._part)
        self._forget()
        if self._world is not None and self._world.is_ours and dist.is_initialized():
            dist.destroy_process_group()
        self._world, self._has_joined = None, False

    @property
    def world(self) -> Membership:
        """The world joined; before any was joined, that of an existing process group or of this process alone."""
        if self._world is None or (not self._has_joined and self._world.size == 1 and self._stale()):
            self._enter(join(Cluster(), self._device_type))
        return self._world  # type: ignore[return-value]

    def _stale(self) -> bool:
        """Returns whether torch.distributed was initialised after we took this process for a world of one."""
        return dist.is_initialized() and dist.get_world_size() > 1

    @property
    def rank(self) -> int:
        world = self._world
        if world is None or (world.size == 1 and not self._has_joined):
            world = self.world
        return world.rank

    @property
    def reports(self) -> bool:
        return not (torch.compiler.is_compiling() or self._is_tracing)  # what is traced is not sent now

    @contextlib.contextmanager
    def into_program(self) -> Iterator[list[events.Event]]:
        """Makes moves, inside, part of the program: for tracers other than torch.compile's own.

        Gives what each run of the program, backward included, will send: the list is filled while moves are made.
        """
        before = self._is_tracing, self._sent, self.comm
        self._is_tracing, self._sent, self.comm = True, [], self._traced
        try:
            yield self._sent
        finally:
            self._is_tracing, self._sent, self.comm = before

    def record(self, op: str, axes: Axes, group: Group, x: torch.Tensor) -> None:
        if self._is_tracing:
            self._sent.append(self.event(op, axes, group, x))
        else:
            super().record(op, axes, group, x)

    def in_program(self, group: Group) -> AbstractContextManager[object]:
        return Under(self._transports, self._watch, group, ("program", None, None))

    def begin(self, op: str, x: torch.Tensor, axes: Axes, group: Group) -> torch.Tensor:
        self.record(op, axes, group, x if op != "all_gather" else x.expand(group.size, *x.shape))
        return begin(op, x, self._transports(group))

    def arrived(self, op: str, x: torch.Tensor) -> torch.Tensor:
        return arrived(op, x)

    def _note_sent(self, x: torch.Tensor, src: Sharding, dst: Sharding) -> None:
        move, size = self._move(src, dst), x.element_size()
        both = (move, move.adjoint) if x.requires_grad and torch.is_grad_enabled() else (move,)
        for step, group in [pair for one in both for pair in one.steps]:
            if step.is_collective:
                sent = step.bytes(size, self.rank)
                self._sent.append(events.Event(step.op, step.axes, group.ranks, sent, events.purpose()))

    def process_index(self) -> int:
        return self.world.rank

    def process_count(self) -> int:
        return self.world.size

    def list_devices(self, kind: str | None = None) -> list[str]:
        world = self.world
        name = "gpu" if world.device.type == "cuda" else world.device.type
        names = [f"{name}:{k}" for k in range(world.size)]
        self._check_asked(names)
        return names if kind is None or _kind(kind) == name else []

    def visible_devices(self) -> list[str]:
        """All devices of the kind in use that this process sees; a world gives it one."""
        count = torch.cuda.device_count() if self._device_type == "cuda" else 1
        return [f"{'gpu' if self._device_type == 'cuda' else 'cpu'}:{k}" for k in range(count)]

    def torch_device(self) -> str | None:
        """This rank's device. Where there are no GPUs and none was asked for, Keras's own choice stays."""
        device = self.world.device
        if device.type == "cpu" and not torch.cuda.is_available() and not isinstance(self._asked, (list, tuple)):
            return None
        return accelerators.name_for_keras(device)

    def _check_asked(self, names: list[str]) -> None:
        asked = self._asked
        count = asked if isinstance(asked, int) else len(asked or names)
        if count != len(names):
            raise too_few(f"use('torch', devices={asked!r})", count, "torch", len(names), self.more_devices)
        if asked is not None and not isinstance(asked, int) and [_canonical(name) for name in asked] != names:
            raise MeshError(f"use('torch', devices={asked!r}): the devices of this world are {names}, in rank order")

    # native objects -------------------------------------------------------------------------------------------

    def mesh(self, mesh: Mesh) -> Any:
        """Returns torch's DeviceMesh, with the axes' names, groups in the mesh's order. Members call together."""
        found = self._meshes.get(mesh)
        if found is None:
            self.check_mesh(mesh)
            alone(self.world)
            device_type = self.world.device.type
            found = self._meshes[mesh] = native.device_mesh(mesh, self.rank, device_type, self.comm.transport)
        return found

    def layout(self, sharding: Sharding) -> native.NativeLayout:
        """The DeviceMesh, and DTensor's `placements` where it has them."""
        return native.NativeLayout(sharding, self.mesh(sharding.mesh))

    # arrays ---------------------------------------------------------------------------------------------------

    def gather(self, x: torch.Tensor, sharding: Sharding) -> Array:
        with torch.no_grad():
            return super().gather(x.detach(), sharding)

    def redistribute(self, x: torch.Tensor, src: Sharding, dst: Sharding) -> torch.Tensor:
        if torch.compiler.is_compiling() or self._is_tracing:
            if self._is_tracing:
                self._note_sent(x, src, dst)
            number = self._traced_move(tracing.parts(src), tracing.parts(dst))
            return tracing.traced(x, number)  # type: ignore[no-any-return]
        if x.requires_grad and torch.is_grad_enabled():
            return super().redistribute(x, src, dst)
        move = self._move(src, dst)
        if move.is_identity:
            return x
        self._check(x, move)
        return move.forward(x)

    def broadcast(self, x: torch.Tensor, sharding: Sharding, axes: Axes, root: int) -> torch.Tensor:
        if torch.compiler.is_compiling() or self._is_tracing:
            number = self._traced_broadcast(tracing.parts(sharding), axes, root)
            return tracing.traced(x, number)  # type: ignore[no-any-return]
        return super().broadcast(x, sharding, axes, root)

    def permute(
        self, x: torch.Tensor, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]
    ) -> torch.Tensor:
        if torch.compiler.is_compiling() or self._is_tracing:
            number = self._traced_permute(tracing.parts(sharding), axes, pairs)
            return tracing.traced(x, number)  # type: ignore[no-any-return]
        return super().permute(x, sharding, axes, pairs)

    # Constants of a compiled program: found while it is compiled.

    @tracing.constant
    def _traced_move(self, src: tracing.Parts, dst: tracing.Parts) -> int:
        def make() -> Both[torch.Tensor]:
            move = Move(self, redistribution(tracing.whole(src), tracing.whole(dst)), self._traced)
            return move.forward, move.backward

        return tracing.number_of(self._numbers, (src, dst), make)

    @tracing.constant
    def _traced_broadcast(self, sharding: tracing.Parts, axes: Axes, root: int) -> int:
        def make() -> Both[torch.Tensor]:
            return self.broadcasting(self._traced, tracing.whole(sharding), axes, root)

        return tracing.number_of(self._numbers, ("broadcast", sharding, axes, root), make)

    @tracing.constant
    def _traced_permute(self, sharding: tracing.Parts, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> int:
        def make() -> Both[torch.Tensor]:
            return self.permuting(self._traced, tracing.whole(sharding), axes, pairs)

        return tracing.number_of(self._numbers, ("permute", sharding, axes, pairs), make)


def _device_type(devices: int | Sequence[str] | None) -> DeviceType:
    if devices is None or isinstance(devices, int):
        return accelerators.preferred()
    kinds = {_kind(name) for name in devices}
    if kinds == {"cpu"}:
        return "cpu"
    if kinds == {"gpu"} and torch.cuda.is_available():
        return "cuda"
    raise BackendNotAvailableError(
        f"use('torch', devices={list(devices)}): all names must be of one kind, 'cpu:k' or 'gpu:k', and of a kind that "
        f"this process has ({'cpu, gpu' if torch.cuda.is_available() else 'cpu'})"
    )


def _kind(name: str) -> str:
    kind = name.lower().partition(":")[0]
    return "gpu" if kind == "cuda" else kind


def _canonical(name: str) -> str:
    return f"{_kind(name)}:{name.partition(':')[2]}"
