"""RehearsingRank: one rank of a mesh whose collectives send nothing. They give shapes, no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod
from typing import ClassVar

import torch

from unidist import events
from unidist.algebra import Axes, Group, Mesh, Sharding, Step, ring_bytes
from unidist.algebra.layout import ReduceOp
from unidist.backends.collectives import Collectives, Done, Handle
from unidist.backends.local import LocalViewBackend
from unidist.backends.protocol import Capabilities, Cluster, dtype_name, itemsize
from unidist.backends.torch.ops import TorchOps
from unidist.backends.torch.shapes import resized


class _Shapes:
    def all_reduce(self, x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        return torch.empty_like(x)

    def all_gather(self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return x.new_empty(resized(x, {dim: sum(sizes)}))

    def reduce_scatter(
        self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        return x.new_empty(resized(x, {dim: sizes[group.index]}))

    def all_to_all(
        self,
        x: torch.Tensor,
        group: Group,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> torch.Tensor:
        return x.new_empty(resized(x, {split: split_sizes[group.index], concat: sum(concat_sizes)}))

    def broadcast(self, x: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        return torch.empty_like(x)

    def permute(self, x: torch.Tensor, group: Group, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return torch.empty_like(x)

    def barrier(self, group: Group) -> None:
        pass

    def all_reduce_inplace(self, x: torch.Tensor, group: Group, op: ReduceOp) -> Handle:
        return Done()

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, group: Group, op: ReduceOp) -> Handle:
        return Done()

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Handle:
        return Done()


class RehearsingRank(LocalViewBackend[torch.Tensor]):
    """The first rank of a mesh, of any size, without the others. No listener hears of its collectives.

    Args:
        mesh: the one mesh that it works on.

    Attributes:
        sent: the collectives so far, as a real rank's ledger has them.
    """

    name: ClassVar[str] = "rehearsal"
    capabilities: ClassVar[Capabilities] = Capabilities(view="local", processes=False)
    carries_values: ClassVar[bool] = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.comm: _Shapes = _Shapes()
        self.ops = TorchOps("meta")
        self.sent: list[events.Event] = []

    @property
    def rank(self) -> int:
        return self._mesh.devices[0]

    def initialize(self, cluster: Cluster) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def process_index(self) -> int:
        return 0

    def process_count(self) -> int:
        return 1

    def list_devices(self, kind: str | None = None) -> list[str]:
        return [f"rehearsal:{k}" for k in range(max(self._mesh.devices) + 1)]

    def mesh(self, mesh: Mesh) -> Mesh:
        return mesh

    def layout(self, sharding: Sharding) -> Sharding:
        return sharding

    def resolve(
        self, step: Step, group: Group, comm: Collectives[torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        function = super().resolve(step, group, comm)
        if not step.is_collective:
            return function

        def noted(x: torch.Tensor) -> torch.Tensor:
            self._note(step.op, step.axes, group, step.bytes(x.itemsize, self.rank))
            return function(x)

        return noted

    def record(self, op: str, axes: Axes, group: Group, x: torch.Tensor) -> None:
        size = prod(x.shape) * itemsize(dtype_name(x))
        self._note(op, axes, group, Fraction(ring_bytes(op, group.size, size)))

    def record_step(self, step: Step, group: Group, x: torch.Tensor) -> None:
        """`resolve` has seen to it."""

    def _note(self, op: str, axes: Axes, group: Group, sent: Fraction) -> None:
        self.sent.append(events.Event(op, axes, group.ranks, sent, events.purpose()))
