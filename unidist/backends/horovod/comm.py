"""HorovodComm: the group collectives, over torch as over TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from unidist import events
from unidist.algebra import Group
from unidist.algebra.layout import ReduceOp
from unidist.backends.collectives import Handle
from unidist.backends.horovod.sets import Transport
from unidist.backends.noting import Kinds, Noted, told
from unidist.backends.protocol import dtype_name
from unidist.errors import CapabilityError

A = TypeVar("A")


class Ways(Protocol[A]):
    """The collectives of a framework's Horovod over one process set.

    As `Collectives` in backends/collectives.py.
    """

    def all_reduce(self, x: A, transport: Transport, op: ReduceOp) -> A: ...

    def all_gather(self, x: A, transport: Transport, dim: int, sizes: Sequence[int]) -> A: ...

    def reduce_scatter(self, x: A, transport: Transport, dim: int, sizes: Sequence[int], op: ReduceOp) -> A: ...

    def all_to_all(
        self,
        x: A,
        transport: Transport,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> A: ...

    def broadcast(self, x: A, transport: Transport, root: int) -> A: ...

    def permute(self, x: A, transport: Transport, pairs: tuple[tuple[int, int], ...]) -> A: ...

    def barrier(self, transport: Transport) -> None: ...

    def zeros_like(self, x: A) -> A: ...


class HorovodComm(Generic[A]):
    """Collectives over one group of ranks (`Collectives` in backends/collectives.py).

    Each has one entry in this process's record (unidist.flight), from its begin until its result is there.

    Raises (all members):
        ProcessLostError: another member ended or did not come in time.
        DesyncError: the members came with different shapes or dtypes.
    """

    def __init__(self, transport: Callable[[Group], Transport], ways: Ways[A]) -> None:
        self.transport = transport
        self._ways = ways
        self._kinds = Kinds()

    def kind(self, op: str, group: Group, x: Any = None) -> int:
        """The number by which this process's record knows a collective."""
        purpose = events.purpose()
        if x is None:
            return self._kinds((op, group.ranks, purpose), lambda: told(op, group.ranks, purpose=purpose))
        shape = tuple(x.shape)

        def make() -> str:
            return told(op, group.ranks, dtype=dtype_name(x), shape=shape, purpose=purpose)

        return self._kinds((op, group.ranks, purpose, shape, x.dtype), make)

    def all_reduce(self, x: A, group: Group, op: ReduceOp) -> A:
        if group.size == 1:
            return x
        with Noted(self.kind("all_reduce", group, x)):
            return self._ways.all_reduce(x, self.transport(group), op)

    def all_gather(self, x: A, group: Group, dim: int, sizes: Sequence[int]) -> A:
        if group.size == 1:
            return x
        with Noted(self.kind("all_gather", group, x)):
            return self._ways.all_gather(x, self.transport(group), dim, sizes)

    def reduce_scatter(self, x: A, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp) -> A:
        if group.size == 1:
            return x
        with Noted(self.kind("reduce_scatter", group, x)):
            return self._ways.reduce_scatter(x, self.transport(group), dim, sizes, op)

    def all_to_all(
        self,
        x: A,
        group: Group,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> A:
        if group.size == 1:
            return x
        with Noted(self.kind("all_to_all", group, x)):
            return self._ways.all_to_all(x, self.transport(group), split, split_sizes, concat, concat_sizes)

    # What works on buffers: only where the framework's arrays can be written to.

    def all_reduce_inplace(self, x: A, group: Group, op: ReduceOp) -> Handle:
        raise CapabilityError(f"{type(x).__name__} cannot be reduced in place: use all_reduce")

    def reduce_scatter_into(self, out: A, x: A, group: Group, op: ReduceOp) -> Handle:
        raise CapabilityError(f"{type(x).__name__} cannot be filled: use reduce_scatter")

    def all_gather_into(self, out: A, x: A, group: Group) -> Handle:
        raise CapabilityError(f"{type(x).__name__} cannot be filled: use all_gather")

    def broadcast(self, x: A, group: Group, root: int) -> A:
        if group.size == 1:
            return x
        with Noted(self.kind("broadcast", group, x)):
            return self._ways.broadcast(x, self.transport(group), root)

    def permute(self, x: A, group: Group, pairs: tuple[tuple[int, int], ...]) -> A:
        if group.size == 1:
            return x if pairs else self._ways.zeros_like(x)
        with Noted(self.kind("permute", group, x)):
            return self._ways.permute(x, self.transport(group), pairs)

    def barrier(self, group: Group) -> None:
        if group.size > 1:
            with Noted(self.kind("barrier", group)):
                self._ways.barrier(self.transport(group))
