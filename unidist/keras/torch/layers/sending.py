"""Sends rows to the devices of the kernels that they have a weight for, and results back.

Each is an uneven all_to_all, and so are their gradients. No row is dropped, and no buffer can be full: how many rows
come is sent before.

Source: Lepikhin et al. 2020, "GShard", arXiv:2006.16668, for experts that data shards share out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch

from unidist import events
from unidist.algebra import Axes
from unidist.backends.local import LocalViewBackend
from unidist.backends.torch.sharded.nested import innermost
from unidist.keras.torch.context import Frame
from unidist.planner.predicting import TO_KERNELS

Tensor = torch.Tensor
# What own kernels make of rows in the order of kernels, given how many rows each has.
Make = Callable[[Tensor, Tensor], Tensor]


def balanced(frame: Frame, axes: Axes, kernels: int, chosen: float, x: Tensor, out: Tensor) -> None:
    """Records what a rank without values sends, forward and backward, if each kernel has as many rows.

    Args:
        axes: along which the places of so many kernels are.
        chosen: for how many of these a row has a weight.
        x, out: the rows, and (kernels, rows, ...) what all make of them.
    """
    backend, group = frame.world.backend, frame.world.mesh.group(axes, frame.rank)
    with events.for_purpose(f"{TO_KERNELS}: {events.purpose()}"):
        backend.record("all_to_all", axes, group, torch.empty(kernels, dtype=torch.int64, device="meta"))
        for rows, share in ((x, chosen), (out, chosen / kernels)):
            own = innermost(rows)
            sent = torch.empty(round(own.numel() * share), dtype=own.dtype, device="meta")
            for _ in range(2 if rows.requires_grad else 1):
                backend.record("all_to_all", axes, group, sent)


@dataclass(frozen=True)
class Sending:
    """The places of a stack's kernels, as a rank sees them.

    Attributes:
        frame: of the rank. axes: along which the places are.
        sizes: how many kernels each place has, in order.
    """

    frame: Frame
    axes: Axes
    sizes: tuple[int, ...]

    def through(self, make: Make, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns what each kernel's device makes of its rows.

        Args:
            make: computes with this device's kernels.
            rows: this rank's, in the order of all kernels. counts: how many each kernel has.
        """
        with events.for_purpose(f"{TO_KERNELS}: {events.purpose()}"):
            own = self._own
            theirs = self._sent(counts, self.sizes, [own] * len(self.sizes)).reshape(-1, own)
            sent = [int(part.sum()) for part in counts.split(list(self.sizes))]
            come = theirs.sum(1).tolist()
            here = self._sent(rows, sent, come)
            # They come by place, and are needed by kernel.
            kernels = (
                torch.arange(own, device=counts.device).repeat(len(self.sizes)).repeat_interleave(theirs.flatten())
            )
            order = kernels.argsort(stable=True)
            made = make(here.index_select(0, order), theirs.sum(0))
            if not len(made):  # torch leaves products of no rows out of its graph, and backward is to come here too
                made = made + here.sum()
            return self._sent(made.index_select(0, order.argsort()), come, sent)

    @property
    def _own(self) -> int:
        return self.sizes[self.frame.world.mesh.group(self.axes, self.frame.rank).index]

    def _sent(self, x: Tensor, sent: Sequence[int], come: Sequence[int]) -> Tensor:
        """Rows from all places, of which so many go to each and come of each; their gradients go back."""
        world, why = self.frame.world, events.purpose()
        backend: LocalViewBackend[Tensor] = world.backend
        group, comm = world.mesh.group(self.axes, self.frame.rank), backend.comm

        def moved(value: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
            if events.listening() and backend.reports:
                away = sum(there) - there[group.index]
                size = Fraction(away * prod(value.shape[1:]) * value.element_size())
                events.emit(events.Event("all_to_all", self.axes, group.ranks, size, why))
            return comm.all_to_all(value, group, 0, there, 0, here)

        return backend.ops.differentiable(lambda v: moved(v, sent, come), lambda grad: moved(grad, come, sent), x)
