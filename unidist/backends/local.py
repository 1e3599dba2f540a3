"""LocalViewBackend: what all adapters share in which a rank holds its own shard.

It folds a Redistribution over the adapter's group collectives, and makes it differentiable by the adjoint, once for all
of them. An adapter gives `comm` (group collectives on its native arrays) and `ops` (cut, join, scale); what they must
have is in collectives.py, and adapters of others may import it here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

from unidist import events
from unidist.algebra import Axes, Group, Mesh, Redistribution, Sharding, Step, redistribution, ring_bytes
from unidist.backends.collectives import Collectives as Collectives
from unidist.backends.collectives import Done as Done
from unidist.backends.collectives import LocalOps as LocalOps
from unidist.backends.protocol import Array, Capabilities, DistributionBackend, dtype_name, itemsize
from unidist.backends.validation import check_count, check_dtype, check_local_shape, check_ranks, check_whole_shape
from unidist.errors import CapabilityError

A = TypeVar("A")
T = TypeVar("T")
MOVES_KEPT = 16384  # redistributions made ready for a rank; as many as redistribution() keeps

# A move and its adjoint.
Both = tuple[Callable[[A], A], Callable[[A], A]]


class LocalViewBackend(DistributionBackend, Generic[A]):
    """Base of the adapters whose ranks hold their shards. See DistributionBackend for the members."""

    capabilities: ClassVar[Capabilities]
    is_virtual: ClassVar[bool] = False
    """Whether this process holds all ranks, each in a thread of its own while `run` works."""
    has_dtensors: ClassVar[bool] = False
    """Whether `layout` gives the device_mesh and the placements of torch's DTensor."""
    tensor: str = "native"
    """What a Keras model's `state_dict()` holds: "native", shards as they are, or "dtensor", DTensors on them."""
    carries_values: ClassVar[bool] = True
    """Whether its collectives carry values; else what they give has a shape alone."""
    compiles: ClassVar[bool] = False
    """Whether its collectives can be part of a program that the framework compiles."""
    more_devices: ClassVar[str] = "make the mesh smaller, or start more"
    """What helps where there are too few devices; {needed} in it is their number."""
    comm: Collectives[A]
    ops: LocalOps[A]

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process (or virtual rank)."""

    def local_ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def ready(self, group: Group) -> None:
        """Makes what carries the tensors of a group, if that takes long. All members come."""

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """fn(rank) on every rank of this process."""
        return [fn(self.rank)]

    def calling_at_turns(self, call: Callable[[int], None]) -> AbstractContextManager[None]:
        """Inside, ranks that take turns in this process call call(rank) as they begin and go on."""
        return nullcontext()

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises MeshError where the mesh names a rank that the world does not have."""
        check_ranks(mesh, self.name, len(self.list_devices()), self.more_devices)

    def into_program(self) -> AbstractContextManager[list[events.Event]]:
        """Inside, moves become part of the program that is being traced; gives what each run of it will send.

        Raises:
            CapabilityError: they cannot (`compiles` is False).
        """
        raise CapabilityError(f"the collectives of {self.name!r} cannot be part of a compiled program")

    def in_program(self, group: Group) -> AbstractContextManager[object]:
        """Inside a program runs that sends among a group.

        Raises (all members that are left):
            ProcessLostError: another member ended or did not come in time.
        """
        return nullcontext()

    def begin(self, op: str, x: A, axes: Axes, group: Group) -> A:
        """Begins a collective in the program that is traced; gives its result, which `arrived` waits for.

        It may go on when the program has ended, and the next one, or who reads it, waits.

        Args:
            op: "all_reduce", a sum, P -> I; "reduce_scatter", a sum of rows, one for each place, P -> S(0);
                "all_gather", S(0) -> I.
            x: contiguous, with at least one dim.

        Raises:
            CapabilityError: it cannot be in one (`compiles` is False).
        """
        raise CapabilityError(f"the collectives of {self.name!r} cannot be part of a compiled program")

    def arrived(self, op: str, x: A) -> A:
        """Waits for what `begin` gave for an op."""
        raise CapabilityError(f"the collectives of {self.name!r} cannot be part of a compiled program")

    # arrays ---------------------------------------------------------------------------------------------------

    def distribute(self, value: Any, sharding: Sharding) -> A:
        whole = self.ops.from_numpy(value)
        check_whole_shape(tuple(whole.shape), sharding)  # type: ignore[attr-defined]
        unsharded = sharding.with_layout(type(sharding.layout)())
        return self.redistribute(whole, unsharded, sharding)

    def from_local(self, shards: Sequence[Any], sharding: Sharding) -> A:
        check_count(shards, self.local_ranks())
        self.check_mesh(sharding.mesh)
        x = self.ops.from_numpy(shards[0])
        check_local_shape(tuple(x.shape), sharding, self.rank)  # type: ignore[attr-defined]
        return x

    def to_local(self, x: A, sharding: Sharding) -> Mapping[int, A]:
        return {self.rank: x}

    def gather(self, x: A, sharding: Sharding) -> Array:
        whole = sharding.with_layout(type(sharding.layout)())
        return self.ops.to_numpy(self._move(sharding, whole).forward(x))

    def redistribute(self, x: A, src: Sharding, dst: Sharding) -> A:
        move = self._move(src, dst)
        if move.is_identity:
            return x
        self._check(x, move)
        return self.ops.differentiable(move.forward, _for_the_same_purpose(move.backward), x)

    def _check(self, x: A, move: Move[A]) -> None:
        if x.dtype not in self._known_dtypes:  # type: ignore[attr-defined]
            self._check_dtype(x)
        if x.shape != move.local_shape:  # type: ignore[attr-defined]
            check_local_shape(tuple(x.shape), move.moves.src, self.rank)  # type: ignore[attr-defined]

    def broadcast(self, x: A, sharding: Sharding, axes: Axes, root: int) -> A:
        return self.ops.differentiable(*self.broadcasting(self.comm, sharding, axes, root), x)

    def broadcasting(self, comm: Collectives[A], sharding: Sharding, axes: Axes, root: int) -> Both[A]:
        """A broadcast and its adjoint, by the given collectives."""
        self.check_mesh(sharding.mesh)
        group = sharding.mesh.group(axes, self.rank)
        fanned = tuple(axis for axis in axes if axis in sharding.layout.fanout)
        others = sharding.mesh.group(fanned, self.rank)

        def forward(value: A) -> A:
            self.record("broadcast", axes, group, value)
            return comm.broadcast(value, group, root)

        def backward(grad: A) -> A:
            if others.size > 1:
                self.record("all_reduce", fanned, others, grad)
                grad = comm.all_reduce(grad, others, "sum")
            return grad if group.index == root else self.ops.full_like(grad, "sum")

        return forward, backward

    def permute(self, x: A, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> A:
        return self.ops.differentiable(*self.permuting(self.comm, sharding, axes, pairs), x)

    def permuting(
        self, comm: Collectives[A], sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]
    ) -> Both[A]:
        """A permutation and its adjoint, by the given collectives."""
        self.check_mesh(sharding.mesh)
        group = sharding.mesh.group(axes, self.rank)
        back = tuple((destination, source) for source, destination in pairs)

        def moved(value: A, by: tuple[tuple[int, int], ...]) -> A:
            self.record("permute", axes, group, value)
            return comm.permute(value, group, by)

        return lambda value: moved(value, pairs), lambda grad: moved(grad, back)

    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        if mesh is None:
            ranks = tuple(range(len(self.list_devices())))
            self.comm.barrier(Group(ranks, ranks.index(self.rank)))
        else:
            self.comm.barrier(mesh.group(axes, self.rank))

    # the fold -------------------------------------------------------------------------------------------------

    @cached_property
    def _moves(self) -> dict[tuple[Sharding, Sharding, int], Move[A]]:
        return {}

    @cached_property
    def _known_dtypes(self) -> set[Any]:
        return set()

    def _move(self, src: Sharding, dst: Sharding) -> Move[A]:
        key = (src, dst, self.rank)
        move = self._moves.get(key)
        if move is None:
            if len(self._moves) >= MOVES_KEPT:
                self._moves.clear()
            self.check_mesh(src.mesh)
            move = self._moves[key] = Move(self, redistribution(src, dst), self.comm)
        return move

    def resolve(self, step: Step, group: Group, comm: Collectives[A]) -> Callable[[A], A]:
        """The step as a function of this rank's array alone: every size and place is looked up beforehand."""
        if step.op == "all_reduce":
            op = step.reduce
            return lambda x: comm.all_reduce(x, group, op)
        if step.op == "all_gather":
            sizes = self._pieces(step.before, step.dim, step.axes)
            return lambda x: comm.all_gather(x, group, step.dim, sizes)
        if step.op == "reduce_scatter":
            sizes = self._pieces(step.after, step.dim, step.axes)
            return lambda x: comm.reduce_scatter(x, group, step.dim, sizes, step.reduce)
        if step.op == "all_to_all":
            split = self._pieces(step.after, step.to, step.axes)
            joined = self._pieces(step.before, step.dim, step.axes)
            return lambda x: comm.all_to_all(x, group, step.to, split, step.dim, joined)
        return self._resolve_local(step, group)

    def _resolve_local(self, step: Step, group: Group) -> Callable[[A], A]:
        ops = self.ops
        if step.op == "slice":
            sizes = self._pieces(step.after, step.dim, step.axes)
            start, length = sum(sizes[: group.index]), sizes[group.index]
            return lambda x: ops.cut(x, step.dim, start, length)
        if step.op == "embed":
            sizes = self._pieces(step.before, step.dim, step.axes)
            start, length = sum(sizes[: group.index]), sum(sizes)
            return lambda x: ops.embed(x, step.dim, start, length)
        if step.op == "mask" and step.reduce in ("sum", "prod") and group.index:
            return lambda x: ops.full_like(x, step.reduce)
        if step.op == "scale":
            factor = step.factor
            return lambda x: ops.scale(x, factor)
        return lambda x: x  # retype, and mask where the value is kept

    def _pieces(self, sharding: Sharding, dim: int, axes: Axes) -> tuple[int, ...]:
        return sharding.pieces(self.rank, dim, axes)

    # bookkeeping ----------------------------------------------------------------------------------------------

    @property
    def reports(self) -> bool:
        """Is true where this rank's collectives go into the ledger (virtual ranks: only the first one's)."""
        return True

    def record(self, op: str, axes: Axes, group: Group, x: A) -> None:
        """Reports to the ledger a collective whose full tensor is `x`."""
        if events.listening() and self.reports:
            events.emit(self.event(op, axes, group, x))

    def event(self, op: str, axes: Axes, group: Group, x: A) -> events.Event:
        """Returns the entry of a ledger for a collective whose full tensor is `x`."""
        full = prod(x.shape) * itemsize(dtype_name(x))  # type: ignore[attr-defined]
        sent = Fraction(0) if op == "barrier" else ring_bytes(op, group.size, full)
        return events.Event(op, axes, group.ranks, sent, events.purpose())

    def record_step(self, step: Step, group: Group, x: A) -> None:
        """Reports to the ledger a step of a plan that starts from `x`."""
        if step.is_collective and self.reports:
            sent = step.bytes(itemsize(dtype_name(x)), self.rank)
            events.emit(events.Event(step.op, step.axes, group.ranks, sent, events.purpose()))

    def _check_dtype(self, x: A) -> None:
        check_dtype(self, dtype_name(x))
        self._known_dtypes.add(x.dtype)  # type: ignore[attr-defined]


class Move(Generic[A]):
    """A plan made ready for one rank: `forward` carries an array, `backward` a gradient the other way.

    Steps over groups of one rank change nothing and are left out.
    """

    __slots__ = ("_adjoint", "_backend", "_comm", "_functions", "is_identity", "local_shape", "moves", "steps")

    def __init__(self, backend: LocalViewBackend[A], moves: Redistribution, comm: Collectives[A]) -> None:
        rank, mesh = backend.rank, moves.src.mesh
        grouped = [(step, mesh.group(step.axes, rank)) for step in moves.steps]
        self.moves = moves
        self.steps = tuple((step, group) for step, group in grouped if group.size > 1)
        self.is_identity = not self.steps
        self.local_shape = moves.src.local_shape(rank)
        self._backend, self._comm = backend, comm
        self._functions = tuple(backend.resolve(step, group, comm) for step, group in self.steps)
        self._adjoint: Move[A] | None = None

    def forward(self, x: A) -> A:
        if events.listening():
            return self._recorded(x)
        for function in self._functions:
            x = function(x)
        return x

    def _recorded(self, x: A) -> A:
        for (step, group), function in zip(self.steps, self._functions, strict=True):
            self._backend.record_step(step, group, x)
            x = function(x)
        return x

    @property
    def adjoint(self) -> Move[A]:
        """The move of the gradient. Raises LayoutError where a step reduces by max, min or prod."""
        if self._adjoint is None:
            self._adjoint = Move(self._backend, self.moves.adjoint, self._comm)
        return self._adjoint

    def backward(self, grad: A) -> A:
        return self.adjoint.forward(grad)


def _for_the_same_purpose(backward: Callable[[A], A]) -> Callable[[A], A]:
    """Backward runs where no purpose is set: its collectives are for what the forward ones were for."""
    why = events.purpose()
    if not why:
        return backward

    def named(grad: A) -> A:
        with events.for_purpose(why):
            return backward(grad)

    return named
