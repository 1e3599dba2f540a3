"""RankCollectives: collectives between virtual ranks, on torch tensors.

The last rank to arrive works for its whole group, in the order of its places; no rank's result shares memory with
another's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import torch

from unidist.algebra import Axes, Group
from unidist.algebra.layout import ReduceOp
from unidist.backends.collectives import Done
from unidist.backends.desync import Call
from unidist.backends.protocol import dtype_name
from unidist.backends.sim.world import VirtualWorld
from unidist.backends.torch.ops import TorchOps
from unidist.errors import DesyncError

Tensor = torch.Tensor
BLOCK = 1 << 16  # elements

# What each op does to the tensor that collects the result. Of bool, sum is "or" and prod "and".
FOLD: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda out, part: out.add_(part),
    "mean": lambda out, part: out.add_(part),
    "prod": lambda out, part: out.mul_(part),
    "max": lambda out, part: torch.maximum(out, part, out=out),
    "min": lambda out, part: torch.minimum(out, part, out=out),
}


class _Named(threading.local):
    axes: Axes = ()


class RankCollectives:
    """Collectives over the virtual ranks of a world. See the protocol Collectives for the members.

    Raises:
        DesyncError: the ranks of a group do not agree, or a rank's array is not as long as its place should hold.
    """

    def __init__(self, world: VirtualWorld, ops: TorchOps) -> None:
        self._world = world
        self._ops = ops
        self._named = _Named()

    def name_axes(self, axes: Axes) -> None:
        """The mesh axes of this rank's next collective, for messages."""
        self._named.axes = axes

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Tensor:
        call = self._call("all_reduce", x, op=op)

        def combine(parts: list[Tensor]) -> list[Tensor]:
            return _copies(self._reduced(parts, op), len(parts))

        return self._meet(group, call, x.detach(), combine)

    def all_reduce_inplace(self, x: Tensor, group: Group, op: ReduceOp) -> Done:
        call = self._call("all_reduce", x, op=op, inplace=True)

        def combine(parts: list[Tensor]) -> list[None]:
            for out, *others in _blocks(parts):
                self._fold(out, others, op)
                for block in others:
                    block.copy_(out)
            return [None] * len(parts)

        self._world.exchange(group.ranks, call, x.detach(), combine)
        return Done()

    def reduce_scatter_into(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp) -> Done:
        self._check_length("reduce_scatter", x, group, 0, group.size * out.shape[0])
        call = self._call("reduce_scatter", x, op=op, inplace=True)

        def combine(parts: list[tuple[Tensor, Tensor]]) -> list[None]:
            # Added up part by part: a whole sum would be one more tensor of the whole's size.
            for place, (own, _) in enumerate(parts):
                own.copy_(self._reduced([whole.chunk(len(parts))[place] for _, whole in parts], op))
            return [None] * len(parts)

        self._world.exchange(group.ranks, call, (out.detach(), x.detach()), combine)
        return Done()

    def all_gather_into(self, out: Tensor, x: Tensor, group: Group) -> Done:
        self._check_length("all_gather", out, group, 0, group.size * x.shape[0])
        call = self._call("all_gather", x, inplace=True)

        def combine(parts: list[tuple[Tensor, Tensor]]) -> list[None]:
            for whole, _ in parts:
                for piece, (_, own) in zip(whole.chunk(len(parts)), parts, strict=True):
                    if piece.data_ptr() != own.data_ptr():
                        piece.copy_(own)
            return [None] * len(parts)

        self._world.exchange(group.ranks, call, (out.detach(), x.detach()), combine)
        return Done()

    def all_gather(self, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        self._check_length("all_gather", x, group, dim, sizes[group.index])
        call = self._call("all_gather", x, open_dims=(dim,), dim=dim, sizes=tuple(sizes))
        return self._meet(group, call, x.detach(), lambda parts: _copies(torch.cat(parts, dim), len(parts)))

    def reduce_scatter(self, x: Tensor, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp) -> Tensor:
        self._check_length("reduce_scatter", x, group, dim, sum(sizes))
        call = self._call("reduce_scatter", x, dim=dim, sizes=tuple(sizes), op=op)

        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [_own(piece) for piece in _split(self._reduced(parts, op), sizes, dim)]

        return self._meet(group, call, x.detach(), combine)

    def all_to_all(
        self,
        x: Tensor,
        group: Group,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> Tensor:
        self._check_length("all_to_all", x, group, split, sum(split_sizes))
        call = self._call("all_to_all", x, open_dims=(split, concat), split=split, concat=concat)
        pieces, dim = _split(x.detach(), split_sizes, split), concat % x.ndim

        def combine(parts: list[tuple[tuple[Tensor, ...], list[int]]]) -> list[Tensor]:
            return [
                self._joined([mine[place] for mine, _ in parts], group, place, dim, wanted)
                for place, (_, wanted) in enumerate(parts)
            ]

        return self._meet(group, call, (pieces, list(concat_sizes)), combine)

    def broadcast(self, x: Tensor, group: Group, root: int) -> Tensor:
        call = self._call("broadcast", x, root=root)
        return self._meet(group, call, x.detach(), lambda parts: [_own(parts[root]) for _ in parts])

    def permute(self, x: Tensor, group: Group, pairs: tuple[tuple[int, int], ...]) -> Tensor:
        call = self._call("permute", x, pairs=pairs)

        def combine(parts: list[Tensor]) -> list[Tensor]:
            source = {destination: place for place, destination in pairs}
            return [
                _own(parts[source[place]]) if place in source else torch.zeros_like(part)
                for place, part in enumerate(parts)
            ]

        return self._meet(group, call, x.detach(), combine)

    def barrier(self, group: Group) -> None:
        call = Call("barrier", axes=self._taken_axes())
        self._world.exchange(group.ranks, call, None, lambda parts: parts)

    # between the ranks ------------------------------------------------------------------------------------------

    def _meet(self, group: Group, call: Call, value: object, combine: Callable[..., Sequence[Tensor]]) -> Tensor:
        result: Tensor = self._world.exchange(group.ranks, call, value, combine)
        return result

    def _call(self, name: str, x: Tensor, *, open_dims: tuple[int, ...] = (), **details: object) -> Call:
        shape: tuple[int | None, ...] = tuple(x.shape)
        if open_dims:
            free = {dim % x.ndim for dim in open_dims}
            shape = tuple(None if dim in free else n for dim, n in enumerate(shape))
        return Call(name, shape, dtype_name(x), tuple(details.items()), self._taken_axes())

    def _taken_axes(self) -> Axes:
        axes, self._named.axes = self._named.axes, ()
        return axes

    def _reduced(self, parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
        result = _own(parts[0])
        for out, *others in _blocks([result, *parts[1:]]):
            self._fold(out, others, op)
        return result

    def _fold(self, out: Tensor, others: Sequence[Tensor], op: ReduceOp) -> None:
        fold = FOLD[op]
        for part in others:
            fold(out, part)
        if op == "mean":
            out.copy_(self._ops.scale(out, 1 / (len(others) + 1)))

    def _joined(self, pieces: list[Tensor], group: Group, place: int, dim: int, wanted: list[int]) -> Tensor:
        found = [piece.shape[dim] for piece in pieces]
        shapes = {(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces}
        if found != wanted or len(shapes) > 1:
            raise DesyncError(
                f"all_to_all among the ranks {group.ranks}: rank {group.ranks[place]} expects pieces of "
                f"length {wanted} along dim {dim}, but is sent shapes {[tuple(piece.shape) for piece in pieces]}",
                ranks=group.ranks,
                collective="all_to_all",
            )
        return torch.cat(pieces, dim)

    def _check_length(self, name: str, x: Tensor, group: Group, dim: int, wanted: int) -> None:
        if x.shape[dim] != wanted:
            rank = group.ranks[group.index]
            raise DesyncError(
                f"{name} among the ranks {group.ranks}: rank {rank} gave an array of shape {tuple(x.shape)}, which "
                f"should be {wanted} long along dim {dim}",
                ranks=(rank,),
                collective=name,
            )


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _blocks(parts: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Yields the same block of each part, one block after the other.

    Small ones stay in the processor's cache while all ranks' are summed and copied, which is what a reduction of large
    tensors costs.
    """
    if parts[0].numel() <= BLOCK or not all(part.is_contiguous() for part in parts):
        return [tuple(parts)]
    return zip(*(part.view(-1).split(BLOCK) for part in parts), strict=True)


def _split(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.split_with_sizes(x, list(sizes), dim))


def _copies(x: Tensor, count: int) -> list[Tensor]:
    """x and copies of it, one for each rank: each may be written to."""
    return [x, *(_own(part) for part in repeat(x, count - 1))]
