"""The collectives of an adapter whose ranks hold their own shards, and a rank's work alone.

local.py makes the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from unidist.algebra import Group
from unidist.algebra.layout import ReduceOp
from unidist.backends.protocol import Array

A = TypeVar("A")
B = TypeVar("B", contravariant=True)


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Returns when the result is in the buffer that was given."""


class Done:
    """A handle of what was done before the call returned."""

    def wait(self) -> None:
        """The result is there."""


class BufferCollectives(Protocol[B]):
    """The collectives on flat buffers that the engine starts, which then goes on computing.

    The engine is the one that trains Keras models.

    All members of a group start the same ones in the same order. Buffers are contiguous and stay as they are until the
    wait. An adapter that has no asynchronous collectives may finish before it returns.
    """

    def all_reduce_inplace(self, x: B, group: Group, op: ReduceOp) -> Handle:
        """Starts to reduce a buffer in place: P -> I. Sends 2(n-1)/n of it."""

    def reduce_scatter_into(self, out: B, x: B, group: Group, op: ReduceOp) -> Handle:
        """Starts to reduce `x`, group.size equal parts along dim 0: P -> S.

        `out` is this place's part. Sends (n-1)/n of x.
        """

    def all_gather_into(self, out: B, x: B, group: Group) -> Handle:
        """Starts to fill `out` with every place's `x`, joined along dim 0: S -> I.

        `x` may be this place's part of `out`. Sends (n-1)/n of out.
        """


class Collectives(BufferCollectives[A], Protocol[A]):
    """Collectives over one group of ranks, on native local arrays. Inputs are left alone unless said.

    `sizes` are the lengths along a dim for each place of the group, in order; they may differ and may be 0.
    """

    def all_reduce(self, x: A, group: Group, op: ReduceOp) -> A: ...

    def all_gather(self, x: A, group: Group, dim: int, sizes: Sequence[int]) -> A: ...

    def reduce_scatter(self, x: A, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp) -> A: ...

    def all_to_all(
        self,
        x: A,
        group: Group,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> A:
        """Cuts `x` along `split`, sends part k to place k, joins what came along `concat`."""

    def broadcast(self, x: A, group: Group, root: int) -> A: ...

    def permute(self, x: A, group: Group, pairs: tuple[tuple[int, int], ...]) -> A: ...

    def barrier(self, group: Group) -> None: ...


class LocalOps(Protocol[A]):
    """The work of a rank with its own array."""

    def from_numpy(self, value: Any) -> A:
        """The native array of a NumPy array, a Python value or a native array (kept, with its gradient)."""

    def to_numpy(self, x: A) -> Array: ...

    def cut(self, x: A, dim: int, start: int, length: int) -> A: ...

    def embed(self, x: A, dim: int, start: int, length: int) -> A:
        """`x` at `start` among zeros, `length` long along `dim`."""

    def scale(self, x: A, factor: float) -> A: ...

    def full_like(self, x: A, op: ReduceOp) -> A:
        """The neutral element of a sum or a product in the shape of x: of another op no plan needs one."""

    def differentiable(self, forward: Callable[[A], A], backward: Callable[[A], A], x: A) -> A:
        """forward(x), whose gradient is backward(gradient)."""
