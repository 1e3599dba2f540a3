"""The `tensorflow` backend: a process holds one DTensor for an array, with the parts of all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, Redistribution, Sharding, redistribution, ring_bytes
from unidist.algebra.layout import ReduceOp
from unidist.backends.local import check_local_shape, check_one_dtype
from unidist.backends.protocol import (
    ALL_DTYPES,
    Array,
    Capabilities,
    Cluster,
    DistributionBackend,
    dtype_name,
    itemsize,
    plain_array,
)
from unidist.backends.tensorflow import arrays, guards, steps
from unidist.backends.tensorflow.devices import (
    DEVICES,
    are_cpus,
    find,
    hide_gpus,
    kind_of,
    make_named,
    make_virtual,
    task_of,
)
from unidist.backends.tensorflow.exchange import OP, Kind, Parts, exchange
from unidist.backends.tensorflow.joining import Membership, join
from unidist.backends.tensorflow.lost import told
from unidist.errors import BackendMismatchError, CapabilityError, LayoutError, MeshError


class TensorflowBackend(DistributionBackend):
    """TensorFlow DTensor in one or more processes. Data: one DTensor (backends/tensorflow/arrays.py says its shape).

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
        told = os.environ.get(DEVICES) if devices is None else None
        if told or are_cpus(devices):
            hide_gpus()
        if told:
            devices = int(told)
        if isinstance(devices, int):
            make_virtual(devices)
        elif devices is not None:
            make_named(devices)
        self._wanted = devices
        self._world: Membership | None = None
        self._forget()

    def _forget(self) -> None:
        self._found: tuple[str, ...] | None = None
        self._meshes: dict[Mesh, dtensor.Mesh] = {}
        self._group_meshes: dict[tuple[Mesh, Axes], tuple[dtensor.Mesh, tuple[int, ...]]] = {}

    # the world

    def initialize(self, cluster: Cluster) -> None:
        if self._world is not None:
            raise BackendMismatchError(
                f"initialize was called a second time: this is process {self._world.index} of {self._world.count} "
                "already; call unidist.shutdown() before joining another world"
            )
        self._world = join(cluster, self._wanted if isinstance(self._wanted, int) else 1)
        self._forget()

    def set_timeout(self, seconds: float) -> None:
        """Changes how long collectives wait."""
        if self.world.gate is not None:
            self.world.gate.timeout = seconds

    def shutdown(self) -> None:
        """Leaves the world. Where it had several processes TensorFlow itself stays in it until the process ends, and
        no other world can be joined: DTensor cannot shut down a world of several clients."""
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
        return tuple(rank for rank in range(len(self.devices)) if self._is_here(rank))

    def without_rank(self, mesh: Mesh) -> tuple[int, ...]:
        """The processes of the world that hold no rank of a mesh."""
        inside = {task_of(self.devices[rank]) for rank in mesh.devices}
        return tuple(index for index in range(self.world.count) if index not in inside)

    def _is_here(self, rank: int) -> bool:
        return task_of(self.devices[rank]) == self.world.index

    def _ranks_here(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if self._is_here(rank))

    # native objects

    def mesh(self, mesh: Mesh) -> dtensor.Mesh:
        found = self._meshes.get(mesh)
        if found is None:
            count = len(self.devices)
            beyond = [rank for rank in mesh.devices if rank >= count]
            if beyond:
                raise MeshError(
                    f"{mesh} names rank {beyond[0]}, but tensorflow has {count} devices: make the mesh smaller, or on "
                    f"CPU call use('tensorflow', devices={max(mesh.devices) + 1}) before any TensorFlow operation"
                )
            found = self._meshes[mesh] = self._native_mesh(mesh.axis_names, mesh.shape, mesh.devices)
        return found

    def _native_mesh(self, names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> dtensor.Mesh:
        here = [place for place, rank in enumerate(ranks) if self._is_here(rank)]
        return dtensor.Mesh(
            list(names),
            np.arange(len(ranks)).reshape(shape),
            here,
            [self.devices[ranks[place]] for place in here],
            global_devices=[self.devices[rank] for rank in ranks] if self.world.count > 1 else None,
        )

    def _group_mesh(self, mesh: Mesh, axes: Axes) -> tuple[dtensor.Mesh, tuple[int, ...]]:
        """[groups, places] along axes, and this process's ranks in the order of its local devices.

        The places of a group are in the order of ranks: DTensor's all_to_all misorders what it moves otherwise.
        """
        found = self._group_meshes.get((mesh, axes))
        if found is None:
            self.mesh(mesh)
            groups = sorted(tuple(sorted(group)) for group in mesh.groups(axes))
            ranks = [rank for group in groups for rank in group]
            native = self._native_mesh(("o", "g"), (len(groups), len(groups[0])), ranks)
            found = self._group_meshes[mesh, axes] = native, self._ranks_here(ranks)
        return found

    def layout(self, sharding: Sharding) -> dtensor.Layout:
        """The dtensor.Layout of a plain DTensor laid out so, as Keras's variables are; where DTensor has none (partial
        axes, several axes on one dim), that of this backend's data."""
        native, layout = self.mesh(sharding.mesh), sharding.layout
        axes = [layout.dim_axes(dim) for dim in range(len(sharding.shape))]
        if layout.partial or layout.fanout or any(len(names) > 1 for names in axes):
            return arrays.stacked_layout(native, len(sharding.shape))
        return dtensor.Layout([names[0] if names else dtensor.UNSHARDED for names in axes], native)

    # in and out

    def distribute(self, value: Any, sharding: Sharding) -> Any:
        self.mesh(sharding.mesh)
        whole = _known(value)
        self._check_dtype(whole)
        if tuple(whole.shape) != sharding.shape:
            raise LayoutError(f"the value has shape {tuple(whole.shape)}, the sharding {sharding.shape}")
        replicated = sharding.with_layout(Layout())
        parts = dict.fromkeys(self._ranks_here(sharding.mesh.devices), whole)
        return self._pack(self._run(redistribution(replicated, sharding), parts), sharding)

    def from_local(self, shards: Sequence[Any], sharding: Sharding) -> Any:
        self.mesh(sharding.mesh)
        ranks = tuple(rank for rank in self.local_ranks() if rank in sharding.mesh.devices)
        if len(shards) != len(ranks):
            raise LayoutError(f"this process holds ranks {ranks}: give {len(ranks)} shards, found {len(shards)}")
        given = {rank: _known(shard) for rank, shard in zip(ranks, shards, strict=True)}
        for rank, shard in given.items():
            self._check_dtype(shard)
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
        """Runs what the processes of some ranks (None: all) take part in, once all of them have come to it. Gate.come
        says of the arguments.

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
            native, ranks = self._group_mesh(mesh, axes)
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
        """forward(x), whose gradient is backward(gradient), and so on in turns. `check` raises where it has none."""
        self._check_concrete(x, "collectives")
        self._check_dtype(x)
        self._check_shape(x, src)
        purpose = events.purpose()

        def grad(upstream: Any) -> Any:
            check()
            with events.for_purpose(purpose):
                return _linear(backward, forward)(upstream)

        return tf.custom_gradient(lambda value: (forward(value), grad))(x)

    # checks and bookkeeping

    def _check_dtype(self, x: Any) -> None:
        found = dtype_name(x)
        if found not in self.capabilities.dtypes:
            raise CapabilityError(
                f"backend 'tensorflow' cannot move {found} arrays: cast to one of {sorted(self.capabilities.dtypes)}"
            )

    def _check_shape(self, x: Any, sharding: Sharding) -> None:
        self.mesh(sharding.mesh)
        wanted = arrays.data_shape(sharding)
        if tuple(x.shape) != wanted:
            raise LayoutError(
                f"the data has shape {tuple(x.shape)}, but that of a tensor of shape {sharding.shape} under "
                f"{sharding.layout} on {sharding.mesh} has {wanted}"
            )

    def _check_concrete(self, x: Any, what: str) -> None:
        if not tf.executing_eagerly() or tf.is_symbolic_tensor(x):
            raise CapabilityError(
                f"backend 'tensorflow' has {what} only outside tf.function: inside there is no value yet"
            )

    def _tell_steps(self, moves: Redistribution, x: Any) -> None:
        """The ledger sees what the first rank of this process sends."""
        ranks = self._ranks_here(sorted(moves.src.mesh.devices)) if events.listening() else ()
        if ranks:
            for step in moves.collectives:
                group = step.before.mesh.group(step.axes, ranks[0])
                sent = step.bytes(itemsize(dtype_name(x)), ranks[0])
                events.emit(events.Event(step.op, step.axes, group.ranks, sent, events.purpose()))

    def _tell(self, op: str, axes: Axes, sharding: Sharding, x: Any) -> None:
        ranks = self._ranks_here(sorted(sharding.mesh.devices)) if events.listening() else ()
        if ranks:
            group = sharding.mesh.group(axes, ranks[0])
            sent = ring_bytes(op, group.size, sharding.elements(ranks[0]) * itemsize(dtype_name(x)))
            events.emit(events.Event(op, axes, group.ranks, sent, events.purpose()))


def _linear(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        return forward(value), _linear(backward, forward)

    found: Callable[[Any], Any] = tf.custom_gradient(both)
    return found


def _known(value: Any) -> Any:
    """A tensor as it is, else TensorFlow's of the value: Python's numbers get its default dtypes."""
    if isinstance(value, tf.Tensor | tf.Variable):
        return tf.convert_to_tensor(value)
    array = plain_array(value)
    return tf.convert_to_tensor(array if hasattr(value, "dtype") else value)
