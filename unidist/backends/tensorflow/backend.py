"""The `tensorflow` backend: a process holds one DTensor for an array, with the parts of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, Redistribution, Sharding, redistribution
from unidist.algebra.layout import ReduceOp
from unidist.backends.joining import joined_already
from unidist.backends.protocol import (
    ALL_DTYPES,
    Array,
    Capabilities,
    Cluster,
    DistributionBackend,
    dtype_name,
    itemsize,
)
from unidist.backends.tensorflow import arrays, guards, steps
from unidist.backends.tensorflow.arrays import differentiable
from unidist.backends.tensorflow.devices import Meshes, find, kind_of, make, task_of
from unidist.backends.tensorflow.exchange import OP, Kind, Parts, exchange
from unidist.backends.tensorflow.joining import Membership, join, told
from unidist.backends.traffic import report, report_steps
from unidist.backends.validation import (
    check_count,
    check_data_shape,
    check_dtype,
    check_local_shape,
    check_one_dtype,
    check_whole_shape,
)
from unidist.errors import CapabilityError, MeshError


class TensorflowBackend(DistributionBackend):
    """TensorFlow DTensor in one or more processes.

    Data: one DTensor, of the shape that arrays.py here gives.

    Works eagerly, where tf.GradientTape records `redistribute`, `broadcast` and `permute`: the gradient of data at
    layout L is data at L.dual(). Inside tf.function there are no shards to move yet, and they raise.

    Args:
        devices: how many devices each process has: virtual ones on CPUs; where there are GPUs, as many must be there.
            Or the names of the world's devices in rank order: "cpu:0", "cpu:1" and so on are virtual CPUs. By default
            all GPUs, else all CPUs.

    Raises:
        BackendMismatchError: TensorFlow has started with another number of virtual devices.
    """

    name: ClassVar[str] = "tensorflow"
    capabilities: ClassVar[Capabilities] = Capabilities(view="global", uneven="padded", dtypes=ALL_DTYPES)

    def __init__(self, devices: int | Sequence[str] | None = None) -> None:
        guards.prepare()
        self._wanted = make(devices)
        self._world: Membership | None = None
        self._forget()

    def _forget(self) -> None:
        self._found: tuple[str, ...] | None = None
        self._meshes: Meshes | None = None

    # the world

    def initialize(self, cluster: Cluster) -> None:
        if self._world is not None:
            raise joined_already(self.process_index(), self.process_count())
        self._world = join(cluster, self._wanted if isinstance(self._wanted, int) else 1)
        self._forget()

    def set_timeout(self, seconds: float) -> None:
        """Changes how long collectives wait."""
        if self.world.gate is not None:
            self.world.gate.timeout = seconds

    def shutdown(self) -> None:
        """Leaves the world.

        Where it had several processes TensorFlow itself stays in it until the process ends, and no other world can be
        joined: DTensor cannot shut down a world of several clients.
        """
        if self.world.gate is not None:
            self.world.gate.close()
        self._world = None
        self._forget()

    @property
    def world(self) -> Membership:
        return self._world or Membership(1, 0)

    def process_index(self) -> int:
        return self.world.index

    def process_count(self) -> int:
        return self.world.count

    @property
    def devices(self) -> tuple[str, ...]:
        """TensorFlow's full names; the k-th is rank k. Starts TensorFlow."""
        if self._found is None:
            self._found = find(self._wanted)
        return self._found

    def list_devices(self, kind: str | None = None) -> list[str]:
        return [f"{kind_of(name)}:{k}" for k, name in enumerate(self.devices) if kind in (None, kind_of(name))]

    def local_ranks(self) -> tuple[int, ...]:
        return self._ranks_here(range(len(self.devices)))

    def without_rank(self, mesh: Mesh) -> tuple[int, ...]:
        """The processes of the world that hold no rank of a mesh."""
        inside = {task_of(self.devices[rank]) for rank in mesh.devices}
        return tuple(index for index in range(self.world.count) if index not in inside)

    @property
    def _native(self) -> Meshes:
        if self._meshes is None:
            self._meshes = Meshes(self.devices, self.world.index, self.world.count)
        return self._meshes

    def _ranks_here(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return self._native.ranks_here(ranks)

    # native objects

    def mesh(self, mesh: Mesh) -> dtensor.Mesh:
        return self._native.of(mesh)

    def layout(self, sharding: Sharding) -> dtensor.Layout:
        """Returns the dtensor.Layout of a plain DTensor laid out so, as Keras's variables are.

        Where DTensor has none (partial axes, several axes on one dim), it is that of this backend's data.
        """
        native, layout = self.mesh(sharding.mesh), sharding.layout
        axes = [layout.dim_axes(dim) for dim in range(len(sharding.shape))]
        if layout.partial or layout.fanout or any(len(names) > 1 for names in axes):
            return arrays.stacked_layout(native, len(sharding.shape))
        return dtensor.Layout([names[0] if names else dtensor.UNSHARDED for names in axes], native)

    # in and out

    def distribute(self, value: Any, sharding: Sharding) -> Any:
        self.mesh(sharding.mesh)
        whole = arrays.known(value)
        check_dtype(self, dtype_name(whole))
        check_whole_shape(tuple(whole.shape), sharding)
        replicated = sharding.with_layout(Layout())
        parts = dict.fromkeys(self._ranks_here(sharding.mesh.devices), whole)
        return self._pack(self._run(redistribution(replicated, sharding), parts), sharding)

    def from_local(self, shards: Sequence[Any], sharding: Sharding) -> Any:
        self.mesh(sharding.mesh)
        ranks = tuple(rank for rank in self.local_ranks() if rank in sharding.mesh.devices)
        check_count(shards, ranks)
        given = {rank: arrays.known(shard) for rank, shard in zip(ranks, shards, strict=True)}
        for rank, shard in given.items():
            check_dtype(self, dtype_name(shard))
            check_local_shape(tuple(shard.shape), sharding, rank)
        check_one_dtype(given.values())
        return self._pack(given, sharding)

    def to_local(self, x: Any, sharding: Sharding) -> Mapping[int, Any]:
        self._check_concrete(x, "the shards")
        self._check_shape(x, sharding)
        parts = self._unpack(x, sharding)
        return {rank: parts[rank] for rank in sorted(parts)}

    def gather(self, x: Any, sharding: Sharding) -> Array:
        self._check_concrete(x, "the value")
        self._check_shape(x, sharding)
        if not self._ranks_here(sharding.mesh.devices):
            raise MeshError(f"this process holds no rank of {sharding.mesh}: only the others can gather the array")
        moves = redistribution(sharding, sharding.with_layout(Layout()))
        self._tell_steps(moves, x)
        parts = self._run(moves, self._unpack(x, sharding))
        with told(self.world, "gather"):
            return np.array(next(iter(parts.values())).numpy())

    def _pack(self, parts: Parts, sharding: Sharding) -> Any:
        ranks = self._ranks_here(sharding.mesh.devices)
        if not ranks:
            raise MeshError(
                f"this process holds no rank of {sharding.mesh}, and DTensor has no array without a part here: make it "
                "on the others only, or on a mesh with a rank of every process"
            )
        return arrays.pack(parts, sharding, self.mesh(sharding.mesh), ranks)

    def _unpack(self, x: Any, sharding: Sharding) -> Parts:
        native = arrays.stacked_layout(self.mesh(sharding.mesh), len(sharding.shape))
        if dtensor.fetch_layout(x) != native:
            # What TensorFlow made of a computation with the data may be elsewhere.
            x = dtensor.relayout(x, native)
        return arrays.unpack(x, sharding, self._ranks_here(sharding.mesh.devices))

    # collectives

    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        moves = redistribution(src, dst)
        if src == dst:
            return x

        def move(how: Callable[[], Redistribution]) -> Callable[[Any], Any]:
            def run(value: Any) -> Any:
                self._tell_steps(how(), value)
                return self._pack(self._run(how(), self._unpack(value, how().src)), how().dst)

            return run

        return self._differentiable(x, src, move(lambda: moves), move(lambda: moves.adjoint), lambda: moves.adjoint)

    def broadcast(self, x: Any, sharding: Sharding, axes: Axes, root: int) -> Any:
        """As DTensor programs a masked all-reduce, which sends up to twice the bytes of a broadcast's bound."""
        fanned = tuple(axis for axis in axes if axis in sharding.layout.fanout)

        def forward(value: Any) -> Any:
            self._tell("broadcast", axes, sharding, value)
            parts = self._unpack(value, sharding)
            return self._pack(steps.broadcast(sharding, axes, root, parts, self._exchange(sharding.mesh)), sharding)

        def backward(grad: Any) -> Any:
            parts = self._unpack(grad, sharding)
            if fanned and sharding.mesh.axis_size(fanned) > 1:
                self._tell("all_reduce", fanned, sharding, grad)
                parts = steps.all_reduce(sharding, fanned, parts, self._exchange(sharding.mesh), "sum")
            return self._pack(steps.only_from(sharding, axes, root, parts), sharding)

        return self._differentiable(x, sharding, forward, backward)

    def permute(self, x: Any, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> Any:
        """As DTensor programs a reduce-scatter, which sends n - 1 parts for a permutation's one."""

        def moving(by: tuple[tuple[int, int], ...]) -> Callable[[Any], Any]:
            def run(value: Any) -> Any:
                self._tell("permute", axes, sharding, value)
                parts = self._unpack(value, sharding)
                return self._pack(steps.permute(sharding, axes, by, parts, self._exchange(sharding.mesh)), sharding)

            return run

        back = tuple((destination, source) for source, destination in pairs)
        return self._differentiable(x, sharding, moving(pairs), moving(back))

    @contextlib.contextmanager
    def together(
        self, what: str, ranks: Sequence[int] | None = None, noted: str = "", axes: Axes = ()
    ) -> Iterator[None]:
        """Runs what the processes of some ranks (None: all) take part in, once all have come to it.

        Gate.come describes the arguments.

        Raises:
            ProcessLostError: one of them has ended, or did not come within the world's timeout.
            DesyncError: they have come to different things.
        """
        if self.world.gate is not None:
            members = tuple(sorted(range(len(self.devices)) if ranks is None else ranks))
            processes = {task_of(self.devices[rank]) for rank in members}
            self.world.gate.come(what, processes, members, noted, axes)
        with told(self.world, what):
            yield

    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        grid = Mesh({"rank": len(self.devices)}) if mesh is None else mesh
        self.mesh(grid)
        ranks = self._ranks_here(grid.devices)
        if self.world.count > 1 and ranks:
            ones = {rank: tf.ones((16,), tf.int32) for rank in ranks}
            found = self._exchange(grid)("reduce", grid.check_axes(axes), ones, "sum")
            with told(self.world, "a barrier"):
                for arrived in found.values():
                    arrived.numpy()

    def _exchange(self, mesh: Mesh) -> steps.Exchange:
        def run(kind: Kind, axes: Axes, parts: Parts, op: ReduceOp) -> Parts:
            native, ranks = self._native.of_groups(mesh, axes)
            if kind in ("scatter", "send", "swap"):
                parts = {rank: steps.by_rank(mesh, axes, rank, part) for rank, part in parts.items()}
            part = next(iter(parts.values()))
            aim = f" for {events.purpose()!r}" if events.purpose() else ""
            what = f"a {kind} of {dtype_name(part)}{list(part.shape)}{aim}"
            noted = f"{OP[kind]} of {dtype_name(part)} {tuple(part.shape)}"
            with self.together(what, mesh.devices, noted, axes):
                found = exchange(kind, native, ranks, parts, op)
            if kind in ("gather", "swap"):
                found = {rank: steps.by_place(mesh, axes, rank, part) for rank, part in found.items()}
            return found

        return run

    def _run(self, moves: Redistribution, parts: Parts) -> Parts:
        for step in moves.steps:
            parts = steps.run(step, parts, self._exchange(moves.src.mesh))
        return parts

    def _differentiable(
        self,
        x: Any,
        src: Sharding,
        forward: Callable[[Any], Any],
        backward: Callable[[Any], Any],
        check: Callable[[], object] = lambda: None,
    ) -> Any:
        self._check_concrete(x, "collectives")
        check_dtype(self, dtype_name(x))
        self._check_shape(x, src)
        return differentiable(x, forward, backward, check)

    # checks and bookkeeping

    def _check_shape(self, x: Any, sharding: Sharding) -> None:
        self.mesh(sharding.mesh)
        check_data_shape(tuple(x.shape), arrays.data_shape(sharding), sharding)

    def _check_concrete(self, x: Any, what: str) -> None:
        if not tf.executing_eagerly() or tf.is_symbolic_tensor(x):
            raise CapabilityError(
                f"backend 'tensorflow' has {what} only outside tf.function: inside there is no value yet"
            )

    def _tell_steps(self, moves: Redistribution, x: Any) -> None:
        ranks = self._ranks_here(sorted(moves.src.mesh.devices)) if events.listening() else ()
        if ranks:
            report_steps(moves, ranks[0], itemsize(dtype_name(x)))

    def _tell(self, op: str, axes: Axes, sharding: Sharding, x: Any) -> None:
        ranks = self._ranks_here(sorted(sharding.mesh.devices)) if events.listening() else ()
        if ranks:
            group = sharding.mesh.group(axes, ranks[0])
            report(op, axes, group, sharding.elements(ranks[0]) * itemsize(dtype_name(x)))
