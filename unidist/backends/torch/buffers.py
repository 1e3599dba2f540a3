"""Collectives on any shards, made of primitives on equal buffers.

This is NCCL's way, and the way of compiled programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Generic

import torch

from unidist.algebra.layout import ReduceOp
from unidist.backends.torch.primitives import Primitives, W
from unidist.backends.torch.reducing import MOVED_AS, REDUCED_AS, extreme, loses_nans, op_for
from unidist.backends.torch.shapes import all_reduce_in_parts, cuts, resized


class BufferedCollectives(Generic[W]):
    """Uneven shards are padded to the largest one; nothing is sent where all shards are empty."""

    def __init__(self, primitives: Primitives[W]) -> None:
        self._primitives = primitives

    def all_reduce(self, x: torch.Tensor, transport: W, op: ReduceOp) -> torch.Tensor:
        if x.numel() == 0:
            return x
        if loses_nans(op, x.dtype):
            return all_reduce_in_parts(x, self, transport, op)
        values = x.to(REDUCED_AS.get(x.dtype, x.dtype)).contiguous()
        out = self._primitives.all_reduce(values, transport, op_for(op, x.dtype)).to(x.dtype)
        return out / transport.size if op == "mean" else out

    def all_gather(self, x: torch.Tensor, transport: W, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        shape = resized(x, {dim: sum(sizes)})
        if prod(shape) == 0:
            return x.new_empty(shape)
        largest = max(sizes)
        values = _padded(_carried(x), dim, largest)
        joined = self._primitives.all_gather(values, transport)
        if dim == 0 and min(sizes) == largest:
            return joined.view(x.dtype)
        parts = joined.chunk(transport.size)
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim).view(x.dtype)

    def reduce_scatter(
        self, x: torch.Tensor, transport: W, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        own = sizes[transport.index]
        if x.numel() == 0:
            return x.new_empty(resized(x, {dim: own}))
        if loses_nans(op, x.dtype):
            return self._extreme_part(x, transport, dim, sizes, op)
        largest = max(sizes)
        values = x.to(REDUCED_AS.get(x.dtype, x.dtype))
        if dim != 0 or min(sizes) != largest:
            values = torch.cat([_padded(part, dim, largest) for part in cuts(values, sizes, dim)])
        out = self._primitives.reduce_scatter(values.contiguous(), transport, op_for(op, x.dtype)).to(x.dtype)
        if own != largest:
            out = out.narrow(dim, 0, own).contiguous()
        return out / transport.size if op == "mean" else out

    def _extreme_part(
        self, x: torch.Tensor, transport: W, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        """A reduce_scatter as an exchange of parts, which sends as many bytes, and a reduction of what came."""
        parts = [part.reshape(-1) for part in cuts(x, sizes, dim)]
        shape = resized(x, {dim: sizes[transport.index]})
        counts = [prod(shape)] * transport.size
        came = self._primitives.all_to_all(torch.cat(parts), transport, counts, [part.numel() for part in parts])
        return extreme(came.view(transport.size, *shape), op)

    def all_to_all(
        self,
        x: torch.Tensor,
        transport: W,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> torch.Tensor:
        own = split_sizes[transport.index]
        # What the group holds together decides whether anyone sends anything: all members must decide alike. Where
        # rows go along one dim, no member knows how many others send.
        held = {concat: 1 if split == concat else sum(concat_sizes)}
        if prod(resized(x, held)) == 0:
            return x.new_empty(resized(x, {split: own, concat: sum(concat_sizes)}))
        shapes = [resized(x, {split: own, concat: n}) for n in concat_sizes]
        parts = cuts(_carried(x), split_sizes, split)
        flat = torch.cat([part.reshape(-1) for part in parts])
        counts = [prod(shape) for shape in shapes]
        came = cuts(self._primitives.all_to_all(flat, transport, counts, [part.numel() for part in parts]), counts)
        return torch.cat([p.view(shape) for p, shape in zip(came, shapes, strict=True)], concat).view(x.dtype)

    def broadcast(self, x: torch.Tensor, transport: W, root: int) -> torch.Tensor:
        if x.numel() == 0:
            return x
        return self._primitives.broadcast(_carried(x).contiguous(), transport, root).view(x.dtype)

    def permute(self, x: torch.Tensor, transport: W, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        if x.numel() == 0 or not pairs:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        sent, received = [0] * transport.size, [0] * transport.size
        for source, destination in pairs:
            if source == transport.index:
                sent[destination] = x.numel()
            if destination == transport.index:
                received[source] = x.numel()
        flat = _carried(x).reshape(-1)[: sum(sent)]
        came = self._primitives.all_to_all(flat.contiguous(), transport, received, sent)
        if not any(received):
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        return came.view(x.shape).view(x.dtype)


def _carried(x: torch.Tensor) -> torch.Tensor:
    return x.view(MOVED_AS[x.dtype]) if x.dtype in MOVED_AS else x


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if x.shape[dim] == size:
        return x.contiguous()
    padding = x.new_zeros(resized(x, {dim: size - x.shape[dim]}))
    return torch.cat([x, padding], dim)
