"""VirtualRanks: the local view that a virtual rank has, on torch tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from unidist.algebra import Axes, Group, Mesh, Sharding, Step
from unidist.backends.collectives import Collectives
from unidist.backends.local import LocalViewBackend
from unidist.backends.protocol import Capabilities, Cluster
from unidist.backends.sim.backend import SimBackend
from unidist.backends.sim.collectives import RankCollectives
from unidist.backends.sim.threads import current_rank
from unidist.backends.sim.world import Enter, VirtualWorld
from unidist.backends.torch.ops import TorchOps
from unidist.errors import CapabilityError

T = TypeVar("T")

# OpenMP gives every thread that computes its own pool: 64 ranks on 16 cores would hold 1,024 threads, and waking a
# pool costs more than small pieces of work take. Ranks share so many computing threads among them, and have at least
# one each.
COMPUTE_THREADS = 64


class VirtualRanks(LocalViewBackend[torch.Tensor]):
    """The simulator for torch: each rank of a world holds its shard. Call it inside of `run`.

    Args:
        world: the virtual ranks.
        device: where arrays that are no tensors yet are put.
    """

    name: ClassVar[str] = "sim"
    is_virtual: ClassVar[bool] = True
    capabilities: ClassVar[Capabilities] = Capabilities(view="local", processes=False)

    def __init__(self, world: VirtualWorld, *, device: torch.device | str = "cpu") -> None:
        self.world = world
        self.ops = TorchOps(device)
        self.comm: RankCollectives = RankCollectives(world, self.ops)
        self._devices = SimBackend(world.size)
        if carry_torch_state not in world.on_enter:
            world.on_enter.append(carry_torch_state)

    def run(self, fn: Callable[..., T], *per_rank: Sequence[Any]) -> list[T]:
        """Runs fn(rank, ...) on every rank, as VirtualWorld.run.

        Each has the caller's state of torch: grad mode, inference mode, autocast, default device.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(max(1, min(before, COMPUTE_THREADS // self.world.size)))
        try:
            return self.world.run(fn, *per_rank)
        finally:
            torch.set_num_threads(before)

    @contextlib.contextmanager
    def calling_at_turns(self, call: Callable[[int], None]) -> Iterator[None]:
        self.world.on_turn.append(call)
        try:
            yield
        finally:
            self.world.on_turn.remove(call)

    @property
    def rank(self) -> int:
        """The rank of the calling thread.

        Raises:
            CapabilityError: it is no virtual rank.
        """
        rank = current_rank()
        if rank is None:
            raise CapabilityError(
                f"thread {threading.current_thread().name!r} is no virtual rank and holds no shard: "
                "call this inside of the function given to run()"
            )
        return rank

    @property
    def reports(self) -> bool:
        return self.rank == 0

    def initialize(self, cluster: Cluster) -> None:
        self._devices.initialize(cluster)

    def shutdown(self) -> None:
        self.world.close()

    def process_index(self) -> int:
        return 0

    def process_count(self) -> int:
        return 1

    def list_devices(self, kind: str | None = None) -> list[str]:
        return self._devices.list_devices(kind)

    def mesh(self, mesh: Mesh) -> Mesh:
        return self._devices.mesh(mesh)

    def layout(self, sharding: Sharding) -> Sharding:
        return self._devices.layout(sharding)

    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        self.comm.name_axes(mesh.check_axes(axes) if mesh is not None else ())
        super().barrier(mesh, axes)

    # The group of a collective says which ranks meet; messages name the axes too.

    def resolve(
        self, step: Step, group: Group, comm: Collectives[torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        function = super().resolve(step, group, comm)
        if not step.is_collective:
            return function

        def named(x: torch.Tensor) -> torch.Tensor:
            self.comm.name_axes(step.axes)
            return function(x)

        return named

    def record(self, op: str, axes: Axes, group: Group, x: torch.Tensor) -> None:
        self.comm.name_axes(axes)
        super().record(op, axes, group, x)


def carry_torch_state() -> Enter:
    """Captures the thread-local state of torch; what is returned puts a rank into it."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()
    device = torch.get_default_device()
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in _device_kinds()
        if torch.is_autocast_enabled(kind)
    ]

    @contextlib.contextmanager
    def enter(rank: int) -> Iterator[None]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        # Backward must call the hooks and functions of a rank in its own thread, for accelerators too.
        torch.autograd.set_multithreading_enabled(False)
        with contextlib.ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            if device != torch.device("cpu"):
                stack.enter_context(device)
            for kind, dtype, cached in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            stack.enter_context(torch.set_grad_enabled(grad))
            yield

    return enter


def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
