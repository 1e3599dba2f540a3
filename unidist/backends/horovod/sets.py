"""Horovod's process sets behind the groups of meshes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unidist.algebra import Axes, Group, Mesh
from unidist.backends.horovod import lost
from unidist.backends.noting import noted, told
from unidist.errors import BackendNotAvailableError, CapabilityError

# Names come back after so many collectives: far more than are ever under way at once.
_NAMES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """One process set, seen from this process.

    Its members are numbered by their places in the mesh's group.

    Attributes:
        native: the process set. Horovod numbers its members in the order of their ranks.
        ranks: the ranks of the places, in order.
        index: this process's place.
        order: the places in the order of their ranks, None where the two orders are one.
        numbers: for the names by which members find each other's collectives; every member draws the same ones.
    """

    native: Any
    ranks: tuple[int, ...]
    index: int
    order: tuple[int, ...] | None
    numbers: Iterator[int]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def name(self) -> str:
        return f"unidist.{self.native.process_set_id}.{next(self.numbers)}"


@dataclass(frozen=True)
class HorovodMesh:
    """Holds this process's process set along each group of axes of more than one rank.

    It is Horovod's nearest thing to a mesh.

    Attributes:
        mesh: whose groups these are.
        process_sets: axes in the mesh's order -> the process set; empty on a process that is not in the mesh.
    """

    mesh: Mesh
    process_sets: dict[Axes, Any] = field(compare=False)


class ProcessSets:
    """The process sets made so far. Horovod makes one with all processes of the world, members or not.

    So all sets of a mesh are made at once, when a mesh is first used, which is at the same point of the program on
    every process; a mesh of some of the ranks must be asked for on all of them (`HorovodBackend.mesh`).

    Args:
        hvd: Horovod of the framework. timeout: seconds to wait for the others.
    """

    def __init__(self, hvd: Any, timeout: float) -> None:
        self._hvd = hvd
        self.timeout = timeout
        self._world = tuple(range(hvd.size()))
        self._native: dict[tuple[int, ...], Any] = {self._world: hvd.global_process_set}
        self._numbers: dict[tuple[int, ...], Iterator[int]] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._meshes: dict[Mesh, HorovodMesh] = {}

    def __call__(self, group: Group) -> Transport:
        transport = self._transports.get(group.ranks)
        if transport is None:
            transport = self._transports[group.ranks] = self._make(group)
        return transport

    def _make(self, group: Group) -> Transport:
        members = tuple(sorted(group.ranks))
        native = self._native.get(members)
        if native is None:
            raise CapabilityError(
                f"no process set of ranks {list(members)}: Horovod makes one with all processes. Call "
                "unidist.backend().mesh(mesh) for the mesh on every process of the world first"
            )
        order = None if members == group.ranks else tuple(group.ranks.index(rank) for rank in members)
        # Groups of one set in several orders share its numbers.
        numbers = self._numbers.setdefault(members, itertools.cycle(range(_NAMES)))
        return Transport(native, group.ranks, group.index, order, numbers)

    def known(self, mesh: Mesh) -> bool:
        return mesh in self._meshes

    def mesh(self, mesh: Mesh, rank: int) -> HorovodMesh:
        """Makes what is missing of a mesh's process sets: along every group of its axes.

        A collective of the world.
        """
        found = self._meshes.get(mesh)
        if found is not None:
            return found
        axes = [name for name, size in mesh.axes if size > 1]
        kinds = [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
        wanted = {tuple(sorted(ranks)) for kind in kinds for ranks in mesh.groups(kind)}
        for members in sorted(wanted - set(self._native)):
            self._native[members] = self._add(members)
        own = {kind: self(mesh.group(kind, rank)).native for kind in kinds} if rank in mesh.devices else {}
        found = self._meshes[mesh] = HorovodMesh(mesh, own)
        return found

    def _add(self, members: tuple[int, ...]) -> Any:
        """Calls hvd.add_process_set, which has no deadline, in a thread; gives up when others do not come."""
        done: list[Any] = []
        failed: list[Exception] = []

        def add() -> None:
            try:
                done.append(self._hvd.add_process_set(list(members)))
            except Exception as error:  # handed to the caller's thread below
                failed.append(error)

        thread = threading.Thread(target=add, daemon=True)
        thread.start()
        at = lost.Call(f"making the process set {list(members)}", self._world, "")
        with noted(told(at.what, self._world)):
            lost.wait(lost.polled(lambda: not thread.is_alive()), at, self.timeout, self._hvd)
        if failed:
            raise BackendNotAvailableError(
                f"Horovod could not make a process set of ranks {list(members)} ({failed[0]}): where your program "
                'calls hvd.init() by itself, it must be hvd.init(process_sets="dynamic")'
            ) from failed[0]
        return done[0]
