"""RowPart: a batch's tensor. This data shard holds its own rows of it.

What computes with it sees the rows of all shards, as code under jax.jit does: what treats each row alone is computed on
this shard's rows; sums and means over the rows are joined by an all_reduce of the sums; for anything else the rows are
gathered (all_gather forward, reduce_scatter backward), and the rank goes on with the whole.

Whatever is not a RowPart is the same on all shards, and its gradient is partial on each of them (layout F), as that of
a weight is: the gradients of all ranks add up to that of one device.

Source of the method: GSPMD (Xu et al. 2021, arXiv:2105.04663), op by op and without a compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unidist import events
from unidist.algebra import Layout
from unidist.keras.compat import get_keras_mask, set_keras_mask
from unidist.keras.torch.context import Frame
from unidist.keras.torch.moving import move
from unidist.keras.torch.rows import rowwise
from unidist.keras.torch.rows.counts import counted
from unidist.keras.torch.rows.parts import Part, mapped, whole

_WHY = "rows of all shards"


class RowPart(Part):
    """A tensor with a row for each of the batch; this rank holds those of its data shard."""

    DIM = 0
    TABLE = rowwise.table(0)
    shaped = staticmethod(counted)

    # Rows of the batches that stand behind each other in it; each shard holds its own of each.
    batches: tuple[int, ...]

    @staticmethod
    def of(frame: Frame, part: torch.Tensor, total: int) -> RowPart:
        """`total`: rows of all shards."""
        return RowPart.behind_each_other(frame, part, (total,))

    @staticmethod
    def behind_each_other(frame: Frame, part: torch.Tensor, batches: tuple[int, ...]) -> RowPart:
        """Several batches. `part`: this shard's rows of each, behind each other."""
        made = RowPart._made(frame, part, (sum(batches), *part.shape[1:]))
        made.batches = batches
        mask = get_keras_mask(part)
        if isinstance(mask, torch.Tensor) and mask.ndim and mask.shape[0] == part.shape[0]:
            set_keras_mask(made, RowPart.behind_each_other(frame, mask, batches))
        return made

    def like(self, part: torch.Tensor, shape: tuple[int, ...]) -> RowPart:
        made = RowPart._made(self.frame, part, shape)
        made.batches = self.batches
        return made

    def goes_with(self, other: Part) -> bool:
        return isinstance(other, RowPart) and other.frame is self.frame and other.batches == self.batches

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) if x.ndim == self.ndim and x.shape[0] == self.shape[0] else x

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This shard's rows of a whole tensor that has as many."""
        if len(self.batches) == 1:
            return own_rows(self.frame, x)
        return torch.cat([own_rows(self.frame, one) for one in x.split(list(self.batches))])

    @property
    def counts(self) -> list[int]:
        """How many rows this shard has of each batch."""
        return [self.frame.world.batch_sharding((n,)).region(self.frame.rank)[0][1] for n in self.batches]

    def whole(self) -> torch.Tensor:
        """The rows of all shards, on every rank: S -> F (all_gather forward, reduce_scatter backward)."""
        if self._part is not None and not self._serves(self._whole):
            with looking(self.frame):
                fan = Layout(fanout=self.frame.world.data_axes)
                self._whole = self.gathered(fan)
            mask = get_keras_mask(self)
            if mask is not None:
                set_keras_mask(self._whole, whole(mask))
        if self._whole is None:
            raise RuntimeError("a RowPart that holds nothing")
        return self._whole

    def gathered(self, layout: Layout) -> torch.Tensor:
        """The rows of all shards, in a layout over the data axes."""
        part, gather = whole(self._part), self.frame.world.gather_rows
        if len(self.batches) == 1:
            return gather(part, self.batches[0], layout)
        parts = part.split(self.counts)
        return torch.cat([gather(one, n, layout) for one, n in zip(parts, self.batches, strict=True)])

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The rows are gathered as S -> I, and what is computed of them is fanned out: I -> F."""
        frame, fan = self.frame, Layout(fanout=self.frame.world.data_axes)

        def alike(x: Any) -> Any:
            if isinstance(x, RowPart) and x.part is not None:
                with looking(frame):
                    return x.gathered(Layout())
            x = whole(x)
            is_partial = isinstance(x, torch.Tensor) and x.requires_grad
            return move(frame, x, tuple(x.shape), fan, Layout()) if is_partial else x

        def fanned(x: Any) -> Any:
            has_gradient = isinstance(x, torch.Tensor) and x.requires_grad
            return move(frame, x, tuple(x.shape), Layout(), fan) if has_gradient else x

        return mapped(fanned, function(*map(alike, args)))


def own_rows(frame: Frame, x: torch.Tensor) -> torch.Tensor:
    """This shard's rows of a whole tensor."""
    start, length = frame.world.batch_sharding(tuple(x.shape)).region(frame.rank)[0]
    return x[start : start + length]


@contextlib.contextmanager
def looking(frame: Frame) -> Iterator[None]:
    """Notes that what computes now looks at the rows of other shards, and what is sent for it."""
    if frame.region is not None:
        frame.region.look()
    with events.for_purpose(frame.region.why if frame.region else _WHY):
        yield


def anchored(x: torch.Tensor) -> torch.Tensor:
    """A tensor with a gradient wherever there may be one: a shard without rows comes to backward's collective too."""
    if not x.is_floating_point() or not torch.is_grad_enabled():
        return x
    return x + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
