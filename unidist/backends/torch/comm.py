"""TorchComm: the group collectives of the torch backend, on whichever transport the tensor and the moment call for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unidist.algebra import Group
from unidist.algebra.layout import ReduceOp
from unidist.backends.local import Handle
from unidist.backends.torch.buffers import BufferedCollectives
from unidist.backends.torch.exchange import DirectCollectives, exchange, scatter
from unidist.backends.torch.lost import tells, told
from unidist.backends.torch.primitives import Eager, all_gather_single, reduce_scatter_single
from unidist.backends.torch.reducing import NATIVE, REDUCED_AS, loses_nans, op_for
from unidist.backends.torch.wires import Wire
from unidist.errors import LayoutError

Ways = DirectCollectives | BufferedCollectives[Wire]


class TorchComm:
    """Collectives over one group of ranks (`Collectives` in backends/local.py).

    CPU tensors over gloo go by direct messages, all others by NCCL's collectives on the current CUDA stream.

    Raises (all members):
        ProcessLostError: another member ended or did not come in time.

    Args:
        wire: finds the process group of a group.
        way: one way for all tensors.
    """

    def __init__(self, wire: Callable[[Group], Wire], way: Ways | None = None) -> None:
        self.wire = wire
        self._direct: Ways = way or DirectCollectives()
        self._other: Ways = way or BufferedCollectives(Eager())

    def _way(self, x: torch.Tensor, wire: Wire) -> Ways:
        return self._direct if wire.is_gloo and x.device.type == "cpu" else self._other

    @tells
    def all_reduce(self, x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        if group.size == 1:
            return x
        wire = self.wire(group)
        return self._way(x, wire).all_reduce(x, wire, op)

    @tells
    def all_gather(self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        if group.size == 1:
            return x
        wire = self.wire(group)
        return self._way(x, wire).all_gather(x, wire, dim, sizes)

    @tells
    def reduce_scatter(
        self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        if group.size == 1:
            return x
        wire = self.wire(group)
        return self._way(x, wire).reduce_scatter(x, wire, dim, sizes, op)

    @tells
    def all_to_all(
        self,
        x: torch.Tensor,
        group: Group,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> torch.Tensor:
        if group.size == 1:
            return x
        wire = self.wire(group)
        return self._way(x, wire).all_to_all(x, wire, split, split_sizes, concat, concat_sizes)

    @tells
    def broadcast(self, x: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        if group.size == 1:
            return x
        wire = self.wire(group)
        return self._way(x, wire).broadcast(x, wire, root)

    @tells
    def permute(self, x: torch.Tensor, group: Group, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        if group.size == 1:
            return x if pairs else torch.zeros_like(x)
        wire = self.wire(group)
        return self._way(x, wire).permute(x, wire, pairs)

    def barrier(self, group: Group) -> None:
        if group.size > 1:
            wire = self.wire(group)
            device = [torch.cuda.current_device()] if "nccl" in dist.get_backend_config(wire.pg) else None
            with told("barrier", group.ranks):
                dist.barrier(wire.pg, device_ids=device)

    # under way ------------------------------------------------------------------------------------------------

    def all_reduce_inplace(self, x: torch.Tensor, group: Group, op: ReduceOp) -> Handle:
        check_contiguous(x)
        if group.size == 1 or x.numel() == 0:
            return Done()
        if loses_nans(op, x.dtype):
            x.copy_(self.all_reduce(x, group, op))
            return Done()
        wire = self.wire(group)
        values = x.view(torch.uint8) if x.dtype == torch.bool else x.to(REDUCED_AS.get(x.dtype, x.dtype))
        with told("all_reduce", group.ranks):
            work = wire.pg.allreduce([values], NATIVE[op_for(op, x.dtype)])

        def finish() -> None:
            work.wait()
            if x.dtype != torch.bool and values is not x:
                x.copy_(values)
            if op == "mean":
                x.div_(group.size)

        return Waiting(finish, "all_reduce", group)

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, group: Group, op: ReduceOp) -> Handle:
        """Starts to reduce `x` (group.size equal parts along dim 0); `out` is this place's part, in rank order.

        Both contiguous; `x` must stay as it is until the wait. Moves (n-1)/n of x.
        """
        check_contiguous(out, x)
        check_parts(out, x, group)
        if group.size == 1 or x.numel() == 0:
            out.copy_(x)
            return Done()
        wire = self.wire(group)
        with told("reduce_scatter", group.ranks):
            if isinstance(self._way(x, wire), DirectCollectives):
                return Waiting(scatter(wire, x.chunk(group.size), op, out), "reduce_scatter", group)
            if loses_nans(op, x.dtype):
                out.copy_(self._other.reduce_scatter(x, wire, 0, [out.shape[0]] * group.size, op))
                return Done()
            dtype = REDUCED_AS.get(x.dtype, x.dtype)
            part = torch.empty_like(out, dtype=dtype)
            work = reduce_scatter_single(part, x.to(dtype), NATIVE[op_for(op, x.dtype)], group=wire.pg, async_op=True)

        def finish() -> None:
            _wait(work)
            out.copy_(part / group.size if op == "mean" else part)

        return Waiting(finish, "reduce_scatter", group)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Handle:
        """Starts to fill `out` with every place's `x`, joined along dim 0; `x` may be this place's part of `out`.

        Both contiguous, all parts of one shape; `x` must stay as it is until the wait. Moves (n-1)/n of out.
        """
        check_contiguous(out, x)
        check_parts(x, out, group)
        if group.size == 1 or x.numel() == 0:
            out.copy_(x)
            return Done()
        wire = self.wire(group)
        with told("all_gather", group.ranks):
            if isinstance(self._way(x, wire), DirectCollectives):
                parts = out.chunk(group.size)
                finish = exchange(wire, [x] * group.size, parts)
                if parts[wire.index].data_ptr() != x.data_ptr():
                    parts[wire.index].copy_(x)
                return Waiting(finish, "all_gather", group)
            work = all_gather_single(_bytes(out), _bytes(x), group=wire.pg, async_op=True)
        return Waiting(lambda: _wait(work), "all_gather", group)


class Done:
    """A handle of what needed no communication."""

    def wait(self) -> None:
        """The result is there."""


class Waiting:
    """A collective under way; `wait` may be called more than once."""

    def __init__(self, finish: Callable[[], object], what: str, group: Group) -> None:
        self._finish: Callable[[], object] | None = finish
        self._what, self._group = what, group

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            with told(self._what, self._group.ranks):
                finish()


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: no transport interprets what it moves."""
    return x.view(-1).view(torch.uint8)


def check_contiguous(*buffers: torch.Tensor) -> None:
    if not all(buffer.is_contiguous() for buffer in buffers):
        raise LayoutError("a collective in place needs contiguous buffers: give x.contiguous()")


def check_parts(part: torch.Tensor, whole: torch.Tensor, group: Group) -> None:
    if part.dim() == 0 or whole.shape != (part.shape[0] * group.size, *part.shape[1:]) or whole.dtype != part.dtype:
        raise LayoutError(
            f"a group of {group.size} with parts of shape {tuple(part.shape)} ({part.dtype}) needs a whole of "
            f"{group.size} times that along dim 0, found {tuple(whole.shape)} ({whole.dtype})"
        )
