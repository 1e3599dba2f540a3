"""Variables on DTensor as checkpoints see them: what each device of this process stores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Sharding
from unidist.backends.protocol import Array
from unidist.checkpoint.shares import Share
from unidist.keras.checkpoint.held import Held, OnMesh, Read, Whole, words
from unidist.keras.consistency.processes import Processes
from unidist.keras.records import variable_record
from unidist.keras.tensorflow import placing, values, worlds


def ready(model: Any) -> None:
    """Places a built model, its optimizer and its metrics, if it is distributed."""
    distribution = placing.distribution_of(model)
    if distribution is not None:
        placing.prepare(model, distribution)


def processes(model: Any) -> Processes | None:
    """Returns the processes that hold the model together, if there are several."""
    return worlds.processes() if placing.is_placed(model) else None


def held(variable: Any) -> Held:
    """A variable, as the devices of this process hold it."""
    record = variable_record.of(variable)
    if not isinstance(variable._value, values.SpreadVariable) or record.layouts is None:
        return Whole(variable)
    shape = tuple(int(n) for n in variable.shape)
    return Stored(variable, Sharding(worlds.in_order(record.distribution.mesh), record.layouts.storage, shape))


class Stored(OnMesh):
    """A variable on a mesh."""

    @property
    def _ranks(self) -> list[int]:
        return [rank for rank in worlds.backend().local_ranks() if rank in self.sharding.mesh.devices]

    # Looked at where a variable is saved: one that is restored lets its former value go.
    @cached_property
    def _shards(self) -> dict[int, tf.Tensor]:
        return dict(zip(self._ranks, dtensor.unpack(self.variable._value.read_value()), strict=True))

    def part(self, rank: int) -> Array:
        return words(self._shards[rank].numpy())

    def exchanged(self, share: Share) -> Iterator[tuple[int, Array]]:
        """DTensor moves on the whole mesh at once."""
        backend, dim = worlds.backend(), share.dim
        before = (slice(None),) * dim
        for start, stop, writers in share.together():
            source, target = share.exchange(self.sharding.mesh, stop - start)
            parts = [self._shards[rank][(*before, slice(start, stop))] for rank in self._ranks]
            with events.for_purpose(f"saving {self.variable.path}"):
                moved = backend.redistribute(backend.from_local(parts, source), source, target)
            for rank, rows in backend.to_local(moved, target).items():
                if rank in writers:
                    first = self.sharding.region(rank)[dim][0] + start
                    yield first + target.region(rank)[dim][0], words(rows.numpy())

    def put(self, read: Read) -> None:
        parts = [tf.constant(value) for value in self.values(self._ranks, read)]
        self.variable._value.assign(dtensor.pack(parts, self.variable._value.layout))
