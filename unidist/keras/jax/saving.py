"""Gives a model on JAX to files: what each device stores, and whole values for the process that saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np

from unidist import events, session
from unidist.algebra import Mesh, Sharding
from unidist.backends.protocol import Array
from unidist.checkpoint.shares import Share
from unidist.keras import active_distribution
from unidist.keras.checkpoint.held import Held, OnMesh, Read, Whole, words
from unidist.keras.consistency.processes import Processes
from unidist.keras.jax import layouts, placing, processes
from unidist.keras.records import variable_record
from unidist.keras.saving import agree_on_room
from unidist.keras.strategies.distribution import adopt


def loading(model: Any) -> Processes | None:
    """Returns the processes of the world, if several hold the model, or would once it is made."""
    found = placing.current() if model is None else placing.distribution_of(model)
    return None if found is None else processes.processes()


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Makes the model's variables, on process 0, whole values in its memory, with which it computes alone.

    A layer with low-rank kernels saves what they make together.
    """
    processes.meet("saving")
    agree_on_room(model, processes.processes())
    held = []
    for variable in active_distribution.all_variables(model):
        value = variable._value
        if value is None or value.is_fully_addressable:
            continue
        host = processes.whole(value)
        if processes.is_first():
            held.append((variable, value, jax.device_put(host, jax.local_devices(backend="cpu")[0])))
    for variable, _, whole in held:
        variable._value = whole
    try:
        yield
    finally:
        for variable, value, _ in held:
            variable._value = value


def processes_of(model: Any) -> Processes | None:
    """Returns the processes that hold the model together, if there are several."""
    distributed = any(variable_record.of(v).distribution is not None for v in active_distribution.all_variables(model))
    return processes.processes() if distributed else None


def held(variable: Any) -> Held:
    """A variable, as the devices of this process hold it."""
    distribution = variable_record.of(variable).distribution
    value = variable._value
    on_mesh = isinstance(value, jax.Array) and isinstance(value.sharding, jax.sharding.NamedSharding)
    if distribution is None or not on_mesh:
        return Whole(variable)
    shape = tuple(int(n) for n in variable.shape)
    return Stored(variable, Sharding(adopt(distribution).mesh, layouts.of_native(value.sharding), shape))


class Stored(OnMesh):
    """A variable on a mesh."""

    # Looked at where a variable is saved: one that is restored lets its former value go.
    @cached_property
    def _shards(self) -> dict[int, jax.Array]:
        return {_rank(shard.device): shard.data for shard in self.variable._value.addressable_shards}

    def part(self, rank: int) -> Array:
        return words(np.asarray(self._shards[rank]))

    def exchanged(self, share: Share) -> Iterator[tuple[int, Array]]:
        backend, dim = session.backend(), share.dim
        for piece in share.pieces():
            team = Mesh({axis: share.sharding.mesh.axis_size(axis) for axis in share.inner}, piece.team)
            source, target = share.exchange(team, piece.stop - piece.start)
            start = self.sharding.region(piece.team[0])[dim][0]
            own = [rank for rank in backend.local_ranks() if rank in piece.team]
            parts = [
                jax.lax.dynamic_slice_in_dim(self._shards[r], piece.start - start, piece.stop - piece.start, dim)
                for r in own
            ]
            with events.for_purpose(f"saving {self.variable.path}"):
                moved = backend.redistribute(backend.from_local(parts, source), source, target)
            for rank, rows in backend.to_local(moved, target).items():
                yield piece.start + target.region(rank)[dim][0], words(np.asarray(rows))

    def put(self, read: Read) -> None:
        devices = [shard.device for shard in self.variable._value.addressable_shards]
        values = self.values(map(_rank, devices), read)
        arrays = [jax.device_put(value, device) for value, device in zip(values, devices, strict=True)]
        sharding = self.variable._value.sharding
        self.variable._value = jax.make_array_from_single_device_arrays(self.shape, sharding, arrays)


def _rank(device: jax.Device) -> int:
    return jax.devices().index(device)
