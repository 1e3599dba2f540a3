"""Collectives on tensors of a device for which there is no transport: they go over the host, and gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unidist.algebra.layout import ReduceOp
from unidist.backends.torch.exchange import DirectCollectives, exchange, scatter
from unidist.backends.torch.transports import Transport


def is_on_host(x: torch.Tensor) -> bool:
    return x.is_cpu


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which nobody else holds."""
    return x.detach().to("cpu", copy=True)


class HostedCollectives:
    """Runs group collectives on copies of the tensors on the host. Slow: each waits for the stream."""

    def __init__(self) -> None:
        self._direct = DirectCollectives()

    def all_reduce(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        return self._direct.all_reduce(copied(x), transport, op).to(x.device)

    def all_gather(self, x: torch.Tensor, transport: Transport, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return self._direct.all_gather(copied(x), transport, dim, sizes).to(x.device)

    def reduce_scatter(
        self, x: torch.Tensor, transport: Transport, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        return self._direct.reduce_scatter(copied(x), transport, dim, sizes, op).to(x.device)

    def all_to_all(
        self,
        x: torch.Tensor,
        transport: Transport,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> torch.Tensor:
        moved = self._direct.all_to_all(copied(x), transport, split, split_sizes, concat, concat_sizes)
        return moved.to(x.device)

    def broadcast(self, x: torch.Tensor, transport: Transport, root: int) -> torch.Tensor:
        return self._direct.broadcast(copied(x), transport, root).to(x.device)

    def permute(self, x: torch.Tensor, transport: Transport, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self._direct.permute(copied(x), transport, pairs).to(x.device)

    # under way ------------------------------------------------------------------------------------------------

    def scatter(
        self, out: torch.Tensor, x: torch.Tensor, transport: Transport, op: ReduceOp
    ) -> Callable[[], torch.Tensor]:
        """Starts a reduce_scatter of equal parts along dim 0; a call of the result waits, and fills `out`."""
        finish = scatter(transport, copied(x).chunk(transport.size), op)
        return lambda: out.copy_(finish())

    def collect(self, out: torch.Tensor, x: torch.Tensor, transport: Transport) -> Callable[[], torch.Tensor]:
        """Starts to join every place's `x` along dim 0; a call of the result waits, and fills `out`."""
        own, whole = copied(x), torch.empty_like(out, device="cpu")
        parts = whole.chunk(transport.size)
        finish = exchange(transport, [own] * transport.size, parts)
        parts[transport.index].copy_(own)

        def filled() -> torch.Tensor:
            finish()
            return out.copy_(whole)

        return filled
