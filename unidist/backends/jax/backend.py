"""The `jax` backend: a process holds global arrays, moved by jitted shard_map programs."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, Redistribution, Sharding, redistribution
from unidist.backends import environment
from unidist.backends.checking import checks_all
from unidist.backends.jax import agreeing, arrays, joining, waiting
from unidist.backends.jax.collectives import Move
from unidist.backends.jax.devices import DTYPES, Configured, check_movable, find, make_named, make_virtual, name_of
from unidist.backends.jax.joining import Membership, join
from unidist.backends.jax.programs import Programs
from unidist.backends.joining import joined_already
from unidist.backends.noting import Kinds, Noted, told
from unidist.backends.protocol import Array, Cluster, DistributionBackend
from unidist.backends.traffic import report, report_steps
from unidist.backends.validation import (
    check_count,
    check_data_shape,
    check_local_shape,
    check_one_dtype,
    check_ranks,
    check_whole_shape,
)
from unidist.errors import CapabilityError, MeshError

# What is the same on all processes in a collective on shards, by its name.
_HOW = {"broadcast": "root", "permute": "pairs"}
_ALONE = Membership(count=1, index=0, timeout=300.0)


class JaxBackend(DistributionBackend):
    """JAX on one or several processes. Data: a global jax.Array, of the shape that arrays.py here gives.

    `redistribute`, `broadcast` and `permute` work on tracers too, inside jax.jit and under jax.grad and jax.vjp (the
    gradient's form: backends/jax/collectives.py). DistributedArray is a pytree once this adapter is in use.

    Args:
        devices: how many devices each process has: virtual ones on CPUs; where there are accelerators, as many must be
            there. Or the names of the world's devices in rank order: "cpu:0", "cpu:1" and so on are virtual CPUs. By
            default all devices of JAX's default platform.

    Raises:
        BackendMismatchError: XLA has started with another number of virtual devices.
    """

    name: ClassVar[str] = "jax"
    capabilities = Configured()

    def __init__(self, devices: int | Sequence[str] | None = None) -> None:
        launch = environment.detect()
        if isinstance(devices, int):
            make_virtual(devices)
        elif devices is not None and (launch is None or launch.process_count == 1):
            make_named(devices)
        self._wanted = devices
        self._world: Membership | None = None
        self._forget()
        arrays.register_tree()

    def _forget(self) -> None:
        self._found: tuple[jax.Device, ...] | None = None
        self._programs = Programs(self.mesh)
        self._agreed: set[Hashable] = set()
        self._kinds = Kinds()
        self._layouts: dict[Sharding, jax.sharding.NamedSharding] = {}
        self._meshes: dict[Mesh, jax.sharding.Mesh] = {}

    # the world

    def initialize(self, cluster: Cluster) -> None:
        if self._world is not None:
            raise joined_already(self.process_index(), self.process_count())
        self._world = join(cluster)
        self._forget()

    def set_timeout(self, seconds: float) -> None:
        """Changes how long collectives wait. How long JAX itself waits at its end stays as it was at joining."""
        self._world = joining.with_timeout(self.world, seconds)

    def shutdown(self) -> None:
        """Leaves the world. Where it had several processes, all arrays and compiled programs of JAX are lost."""
        world, self._world = self._world, None
        if world is not None:
            world.leave()
            self._forget()

    @property
    def world(self) -> Membership:
        return self._world or _ALONE

    def process_index(self) -> int:
        return self.world.index

    def process_count(self) -> int:
        return self.world.count

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The k-th is rank k. Starts XLA."""
        if self._found is None:
            self._found = find(self._wanted)
        return self._found

    def list_devices(self, kind: str | None = None) -> list[str]:
        return [name_of(device) for device in self.devices if kind in (None, device.platform)]

    def local_ranks(self) -> tuple[int, ...]:
        here = self.world.index
        return tuple(rank for rank, device in enumerate(self.devices) if device.process_index == here)

    def _ranks_here(self, mesh: Mesh) -> tuple[int, ...]:
        return tuple(rank for rank in self.local_ranks() if rank in mesh.devices)

    # native objects

    def mesh(self, mesh: Mesh) -> jax.sharding.Mesh:
        found = self._meshes.get(mesh)
        if found is None:
            remedy = "make the mesh smaller, or on CPU call use('jax', devices={needed}) before any JAX operation"
            check_ranks(mesh, "jax", len(self.devices), remedy)
            grid = np.array([self.devices[rank] for rank in mesh.devices]).reshape(mesh.shape)
            auto = (jax.sharding.AxisType.Auto,) * len(mesh.shape)
            found = self._meshes[mesh] = jax.sharding.Mesh(grid, mesh.axis_names, axis_types=auto)
        return found

    def layout(self, sharding: Sharding) -> jax.sharding.NamedSharding:
        """The NamedSharding of data at `sharding`."""
        found = self._layouts.get(sharding)
        if found is None:
            found = jax.sharding.NamedSharding(self.mesh(sharding.mesh), arrays.partition_spec(sharding))
            self._layouts[sharding] = found
        return found

    # in and out

    def distribute(self, value: Any, sharding: Sharding) -> jax.Array:
        if isinstance(value, jax.core.Tracer):
            return self.redistribute(value, sharding.with_layout(Layout()), sharding)
        whole = arrays.known(value)
        check_movable(self, whole)
        check_whole_shape(whole.shape, sharding)
        if isinstance(whole, jax.Array):
            if self.world.count == 1:
                replicated = sharding.with_layout(Layout())
                return self.redistribute(jax.device_put(whole, self.layout(replicated)), replicated, sharding)
            whole = np.asarray(whole)
        parts = {rank: arrays.contribution(whole, sharding, rank) for rank in self._ranks_here(sharding.mesh)}
        return self._assembled(parts, sharding, whole.dtype)

    def from_local(self, shards: Sequence[Any], sharding: Sharding) -> jax.Array:
        if any(isinstance(shard, jax.core.Tracer) for shard in shards):
            raise CapabilityError(
                "backend 'jax' cannot assemble shards inside jax.jit or jax.grad: call from_local outside and pass "
                "the DistributedArray in"
            )
        ranks = self._ranks_here(sharding.mesh)
        check_count(shards, ranks)
        given = [arrays.known(shard) for shard in shards]
        for rank, shard in zip(ranks, given, strict=True):
            check_movable(self, shard)
            check_local_shape(tuple(shard.shape), sharding, rank)
        check_one_dtype(given)
        pads = [arrays.pad_on_device if isinstance(shard, jax.Array) else arrays.pad for shard in given]
        parts = {rank: fill(shard, sharding) for rank, shard, fill in zip(ranks, given, pads, strict=True)}
        return self._assembled(parts, sharding, given[0].dtype if given else None)

    def _assembled(self, parts: Mapping[int, Any], sharding: Sharding, dtype: Any) -> jax.Array:
        return arrays.assemble(parts, sharding, self.layout(sharding), self.devices.__getitem__, dtype)

    def to_local(self, x: jax.Array, sharding: Sharding) -> Mapping[int, jax.Array]:
        self._check_concrete(x, "the shards")
        self._check_shape(x, sharding)
        held = {shard.device: shard.data for shard in self._placed(x, sharding).addressable_shards}
        return {
            rank: arrays.strip(held[self.devices[rank]], sharding, rank) for rank in self._ranks_here(sharding.mesh)
        }

    def _placed(self, x: jax.Array, sharding: Sharding) -> jax.Array:
        """x where the sharding says: what the compiler made of a function's result may be elsewhere."""
        native = self.layout(sharding)
        return x if x.sharding == native else jax.device_put(x, native)

    def gather(self, x: jax.Array, sharding: Sharding) -> Array:
        self._check_concrete(x, "the value")
        if not self._ranks_here(sharding.mesh):
            raise MeshError(f"this process holds no rank of {sharding.mesh}: only the others can gather the array")
        with self._noted("gather", sharding, x):
            whole = self._redistribute(x, sharding, sharding.with_layout(Layout()), "gather")
            waiting.until_ready(whole, self.world, "gather", is_noted=True)
        return np.array(whole.addressable_data(0))

    # collectives

    def redistribute(self, x: jax.Array, src: Sharding, dst: Sharding) -> jax.Array:
        return self._redistribute(x, src, dst, "redistribute")

    def _redistribute(self, x: jax.Array, src: Sharding, dst: Sharding, what: str) -> jax.Array:
        move = self._programs.redistribution(src, dst)
        if x.dtype not in DTYPES or x.shape != move.shape:
            check_movable(self, x)
            self._check_shape(x, src)
        if events.listening():
            self._tell_steps(redistribution(src, dst), x)
        steps = redistribution(src, dst).collectives if self.world.count > 1 else ()
        is_gather = what == "gather"
        name = what if is_gather else ", ".join(step.op for step in steps)
        axes = tuple(dict.fromkeys(axis for step in steps for axis in step.axes))
        with self._noted(name, src, x, axes) if steps and not is_gather else contextlib.nullcontext():
            if steps:
                self._agree(name, src, x, (("from", src.layout), ("to", dst.layout)))
            return self._run(move.unhurried if is_gather and self.world.count > 1 else move.program, x, what)

    def broadcast(self, x: jax.Array, sharding: Sharding, axes: Axes, root: int) -> jax.Array:
        """Replaces the replicas along `axes` by those of place `root`.

        As compiled a masked all-reduce, which sends up to twice the bytes of a broadcast's bound: XLA on CPU has no
        broadcast.
        """
        return self._on_shards("broadcast", x, sharding, axes, root)

    def permute(self, x: jax.Array, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> jax.Array:
        return self._on_shards("permute", x, sharding, axes, pairs)

    def _on_shards(self, op: str, x: jax.Array, sharding: Sharding, axes: Axes, how: Any) -> jax.Array:
        check_movable(self, x)
        self._check_shape(x, sharding)
        if events.listening() and not isinstance(x, jax.core.Tracer):
            self._tell(op, axes, sharding, x)
        with self._noted(op, sharding, x, axes):
            if self.world.count > 1:
                self._agree(op, sharding, x, (("axes", axes), (_HOW[op], how), ("layout", sharding.layout)))
            return self._run(self._programs.on_shards(op, sharding, axes, how), x, op)

    def _noted(
        self, op: str, sharding: Sharding, x: jax.Array, axes: Axes = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, this process's record shows a collective: until it is dispatched, which may wait for others."""
        if self.world.count == 1 or isinstance(x, jax.core.Tracer):
            return contextlib.nullcontext()
        purpose = events.purpose()

        def make() -> str:
            processes = self._processes(sharding.mesh)
            dtype, shape = str(x.dtype), sharding.shape
            return told(op, processes, dtype=dtype, shape=shape, axes=axes, purpose=purpose, members="process")

        return Noted(self._kinds((op, sharding.shape, sharding.mesh, x.dtype, axes, purpose), make))

    def _processes(self, mesh: Mesh) -> list[int]:
        return sorted({self.devices[rank].process_index for rank in mesh.devices})

    def _run(self, program: Move, x: jax.Array, what: str) -> jax.Array:
        with waiting.lost_in(self.world, what):
            return program(x)

    def _agree(self, what: str, sharding: Sharding, x: jax.Array, how: tuple[tuple[str, Hashable], ...]) -> None:
        """Returns when the processes that hold ranks of the mesh have come to the same collective.

        Does nothing inside of jax.jit, and where this one was compared before, unless UNIDIST_CHECK is "all".
        """
        key = what, sharding, x.dtype, how
        if isinstance(x, jax.core.Tracer) or (key in self._agreed and not checks_all()):
            return
        processes = self._processes(sharding.mesh)
        if self.world.index in processes:
            parts = {"array": f"{x.dtype} {sharding.shape}", **{name: str(value) for name, value in how}}
            parts["mesh"] = str(sharding.mesh)
            agreeing.meet(self.world, what, parts, processes, self.devices)
        self._agreed.add(key)

    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        everyone = Mesh({"rank": len(self.devices)})
        grid = everyone if mesh is None else mesh
        self.mesh(grid)
        if self.world.count > 1 and self._ranks_here(grid):
            names = grid.check_axes(axes)
            count = Sharding(grid, Layout(partial=names), ())
            ones = {rank: np.ones((1,) * len(names), np.int32) for rank in self._ranks_here(grid)}
            program = self._programs.redistribution(count, count.with_layout(Layout())).unhurried
            present = self._assembled(ones, count, np.int32)
            with self._noted("barrier", count, present, names):
                self._agree("barrier", count, present, (("axes", names),))
                arrived = self._run(program, present, "barrier")
                waiting.until_ready(arrived, self.world, "barrier", is_noted=True)

    # gradients

    def gradient(self, cotangent: jax.Array, sharding: Sharding) -> jax.Array:
        """Data at sharding.layout.dual() from what jax.grad or jax.vjp gave for data at `sharding`.

        Raises:
            LayoutError: an axis is partial by max, min or prod: there is no gradient.
        """
        self._check_shape(cotangent, sharding)
        return self._programs.on_shards("gradient", sharding)(cotangent)

    def cotangent(self, gradient: jax.Array, sharding: Sharding) -> jax.Array:
        """The inverse: what jax.vjp wants for data at `sharding`, from data at sharding.layout.dual()."""
        self._check_shape(gradient, sharding.with_layout(sharding.layout.dual()))
        return self._programs.on_shards("cotangent", sharding)(gradient)

    # checks and bookkeeping

    def _check_shape(self, x: jax.Array, sharding: Sharding) -> None:
        check_data_shape(x.shape, arrays.data_shape(sharding), sharding)

    def _check_concrete(self, x: jax.Array, what: str) -> None:
        if isinstance(x, jax.core.Tracer):
            raise CapabilityError(
                f"backend 'jax' has {what} only outside jax.jit and jax.grad: inside there is no value yet"
            )

    def _tell_steps(self, moves: Redistribution, x: jax.Array) -> None:
        ranks = self._ranks_here(moves.src.mesh)
        if ranks and not isinstance(x, jax.core.Tracer):
            report_steps(moves, ranks[0], x.dtype.itemsize)

    def _tell(self, op: str, axes: Axes, sharding: Sharding, x: jax.Array) -> None:
        ranks = self._ranks_here(sharding.mesh)
        if ranks:
            group = sharding.mesh.group(axes, ranks[0])
            report(op, axes, group, sharding.elements(ranks[0]) * x.dtype.itemsize)
