"""Collectives by direct messages between all members: what gloo is fastest at.

Every member sends each other member what is meant for it and folds what came in the order of the places, so a
reduction's bits depend neither on timing nor on who computes them. In benchmarks/collectives_torch.py reduce_scatter
takes a third of the time of gloo's and all_gather half to nine tenths; gloo's all_reduce stays ahead for large tensors
and is used there, but for max and min of floats, which lose NaN in gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from unidist.algebra.layout import ReduceOp
from unidist.backends.torch.reducing import MOVED_AS, NATIVE, REDUCED_AS, fold, loses_nans, op_for
from unidist.backends.torch.shapes import all_reduce_in_parts, cuts, resized
from unidist.backends.torch.transports import Transport

# Bytes that come in, up to which an all_reduce is one exchange of whole tensors: there it takes a quarter to a half of
# the time of a reduction in two phases.
SMALL = 1 << 18


class DirectCollectives:
    """Group collectives on CPU tensors over gloo. Shards of any size; no message for an empty one."""

    def all_reduce(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        if x.numel() == 0:
            return x
        own = x.contiguous()
        if own.nbytes * (transport.size - 1) <= SMALL:
            if transport.size == 2:
                return _with_the_other(own, transport, op)
            parts = [own if k == transport.index else torch.empty_like(own) for k in range(transport.size)]
            exchange(transport, [own] * transport.size, parts)()
            return fold(parts, transport.index, op)
        if loses_nans(op, x.dtype):
            return all_reduce_in_parts(own, self, transport, op)
        out = own.to(REDUCED_AS.get(x.dtype, x.dtype), copy=True)
        compare(transport)
        transport.messages.allreduce([out], NATIVE[op_for(op, x.dtype)]).wait()
        out = out.to(x.dtype)
        return out.div_(transport.size) if op == "mean" else out

    def all_gather(self, x: torch.Tensor, transport: Transport, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        own = x.contiguous()
        if prod(x.shape[:dim]) == 1:  # the parts are one after the other: they come where they belong
            out = x.new_empty(resized(x, {dim: sum(sizes)}))
            parts = cuts(out, sizes, dim)
            finish = exchange(transport, [own] * transport.size, parts)
            parts[transport.index].copy_(own)
            finish()
            return out
        parts = [x.new_empty(resized(x, {dim: n})) if k != transport.index else own for k, n in enumerate(sizes)]
        exchange(transport, [own] * transport.size, parts)()
        return torch.cat(parts, dim)

    def reduce_scatter(
        self, x: torch.Tensor, transport: Transport, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        sent = [part.contiguous() for part in cuts(x, sizes, dim)]
        return scatter(transport, sent, op)()

    def all_to_all(
        self,
        x: torch.Tensor,
        transport: Transport,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> torch.Tensor:
        sent = [part.contiguous() for part in cuts(x, split_sizes, split)]
        shape = resized(x, {split: split_sizes[transport.index], concat: sum(concat_sizes)})
        if prod(shape[:concat]) == 1:
            out = x.new_empty(shape)
            parts = cuts(out, concat_sizes, concat)
            finish = exchange(transport, sent, parts)
            parts[transport.index].copy_(sent[transport.index])
            finish()
            return out
        shapes = [resized(x, {split: split_sizes[transport.index], concat: n}) for n in concat_sizes]
        parts = [sent[k] if k == transport.index else x.new_empty(one) for k, one in enumerate(shapes)]
        exchange(transport, sent, parts)()
        return torch.cat(parts, concat)

    def broadcast(self, x: torch.Tensor, transport: Transport, root: int) -> torch.Tensor:
        if x.numel() == 0:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        bits = out.view(MOVED_AS[x.dtype]) if x.dtype in MOVED_AS else out
        compare(transport)
        transport.pg.broadcast(bits, root).wait()
        return out

    def permute(self, x: torch.Tensor, transport: Transport, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        own = x.contiguous()
        sent: list[torch.Tensor | None] = [None] * transport.size
        received: list[torch.Tensor | None] = [None] * transport.size
        out = torch.zeros_like(own)
        for source, destination in pairs:
            if source == destination == transport.index:
                out.copy_(own)
            elif source == transport.index:
                sent[destination] = own
            elif destination == transport.index:
                received[source] = out
        exchange(transport, sent, received)()
        return out


def _with_the_other(own: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
    """An all_reduce of two: an exchange, and a fold. As `exchange`, without what more members need."""
    me, messages, tag = transport.index, transport.messages, transport.calls.tag()
    came = torch.empty_like(own)
    received = messages.recv([came], 1 - me, tag)
    sent = messages.send([own], 1 - me, tag)
    limit = transport.limit()
    received.wait(limit)
    sent.wait(limit)
    return fold((came, own) if me else (own, came), me, op)


def exchange(
    transport: Transport, sent: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]
) -> Callable[[], None]:
    """Starts to send sent[k] to each other place k and to fill received[k] from it.

    A call of the result waits.

    Contiguous tensors; None and empty ones are no message. The own place is left alone. `sent` must stay as it is
    until the wait.
    """
    me, n, pg, tag = transport.index, transport.size, transport.messages, transport.calls.tag()
    works: list[tuple[Any, torch.Tensor]] = []  # a tensor must live until its message is through
    for step in range(1, n):
        place = (me - step) % n
        tensor = received[place]
        if tensor is not None and tensor.numel():
            works.append((pg.recv([tensor], place, tag), tensor))
    for step in range(1, n):
        place = (me + step) % n
        tensor = sent[place]
        if tensor is not None and tensor.numel():
            works.append((pg.send([tensor], place, tag), tensor))

    def finish() -> None:
        limit = transport.limit()
        for work, _ in works:
            # gloo's messages keep to the timeout that the group was made with.
            work.wait(limit)

    return finish


def compare(transport: Transport) -> None:
    """Returns when the neighbours in the ring have come to the same call.

    Who came to another one goes no further, and the watch says why. A transport's own collective would end the process,
    or give numbers of the wrong call.
    """
    if transport.is_gloo and transport.calls.is_fresh:
        sent: list[torch.Tensor | None] = [None] * transport.size
        received = list(sent)
        sent[(transport.index + 1) % transport.size] = torch.zeros(1, dtype=torch.uint8)
        received[(transport.index - 1) % transport.size] = torch.empty(1, dtype=torch.uint8)
        exchange(transport, sent, received)()


def scatter(
    transport: Transport, sent: Sequence[torch.Tensor], op: ReduceOp, out: torch.Tensor | None = None
) -> Callable[[], torch.Tensor]:
    """Starts a reduce_scatter of contiguous parts, one for each place.

    A call of the result waits and gives ours, in `out` if that is given.
    """
    own = sent[transport.index]
    parts = [own if k == transport.index else torch.empty_like(own) for k in range(transport.size)]
    finish = exchange(transport, sent, parts)

    def reduced() -> torch.Tensor:
        finish()
        return fold(parts, transport.index, op, out)

    return reduced
