"""The processes of a world in a line: arrays from any one to all, and from each to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unidist import events, session
from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.protocol import Array, DistributionBackend
from unidist.keras.consistency.processes import Processes

_AXIS = "rank"


@dataclass(frozen=True)
class Line:
    """Collectives of several processes, by the backend in use: bytes, where `Processes` has numbers.

    Args:
        processes: those that take part in each.
        purpose: what is moved, for the ledger and for errors.
    """

    processes: Processes
    purpose: str

    @cached_property
    def _mesh(self) -> Mesh:
        ranks = sorted(rank for ranks in self.processes.ranks for rank in ranks)
        return Mesh({_AXIS: len(ranks)}, ranks)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.processes.ranks[self.processes.place]

    def of_place(self, place: int, given: Array) -> Array:
        """One process's array, on all. All give one of the same shape, of int32."""
        backend = session.backend()
        sharding = Sharding(self._mesh, Layout(), given.shape)
        root = self._mesh.devices.index(self.processes.ranks[place][0])
        with events.for_purpose(self.purpose):
            held = backend.from_local([given] * len(self._own), sharding)
            return backend.gather(backend.broadcast(held, sharding, (_AXIS,), root), sharding)

    def bytes_of_place(self, place: int, data: bytes) -> bytes:
        """One process's bytes, on all; what others give is not looked at."""
        length = int(self.of_place(place, np.array([len(data)], np.int32))[0])
        given = room(length)
        if self.processes.place == place:
            given.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        return self.of_place(place, given).view(np.uint8)[:length].tobytes()

    def sent(self, given: Array, pairs: Sequence[tuple[int, int]]) -> Array:
        """Returns what another process has sent here. All give an array of one length, of int32.

        Args:
            pairs: (place that sends, place that gets); each place stands once on either side.
        """
        backend = session.backend()
        mesh, first = self._mesh, self.processes.firsts
        sharding = Sharding(mesh, Layout(_AXIS), (mesh.size, len(given)))
        index = mesh.devices.index
        among = tuple((index(first[source]), index(first[target])) for source, target in pairs)
        with events.for_purpose(self.purpose):
            held = backend.from_local([given[None]] * len(self._own), sharding)
            moved = backend.permute(held, sharding, (_AXIS,), among)
            found: Array = _numpy(backend, backend.to_local(moved, sharding)[self._own[0]])[0]
        return found


def room(nbytes: int) -> Array:
    """Zeros of int32 that hold so many bytes, a power of two: programs are compiled once for a shape."""
    return np.zeros(1 << max(-(-nbytes // 4) - 1, 255).bit_length(), np.int32)


def _numpy(backend: DistributionBackend, native: Any) -> Array:
    ops = getattr(backend, "ops", None)
    found: Array = np.asarray(native) if ops is None else ops.to_numpy(native)
    return found
