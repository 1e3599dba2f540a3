"""TorchComm: the torch backend's group collectives, each on the transport that suits the tensor.

The moment counts too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unidist.algebra import Group
from unidist.algebra.layout import ReduceOp
from unidist.backends.collectives import Done, Handle
from unidist.backends.torch.buffers import BufferedCollectives
from unidist.backends.torch.calling import InFlight, Under
from unidist.backends.torch.exchange import DirectCollectives, compare, exchange, scatter
from unidist.backends.torch.hosted import HostedCollectives, copied, is_on_host
from unidist.backends.torch.primitives import Eager, all_gather_single, reduce_scatter_single
from unidist.backends.torch.reducing import NATIVE, REDUCED_AS, loses_nans, op_for
from unidist.backends.torch.transports import Transport, Transports
from unidist.backends.torch.watch import Watch
from unidist.errors import LayoutError

Ways = DirectCollectives | HostedCollectives | BufferedCollectives[Transport]
Detail = tuple[str, Hashable]


class TorchComm:
    """Collectives over one group of ranks (`Collectives` in backends/collectives.py).

    CPU tensors over gloo go by direct messages, others by NCCL's collectives on the current CUDA stream; where there
    is no NCCL, over the host and gloo.

    Raises (all members):
        ProcessLostError: another member ended or did not come in time.
        DesyncError: another member came to another collective, shape or dtype, or none can go on (UNIDIST_CHECK in
            checking.py says how many are compared before they start).

    Args:
        transport: finds the process group of a group.
        way: one way for all tensors.
        watch: of this process; without one, members do not compare what they call.
    """

    def __init__(self, transport: Transports, way: Ways | None = None, watch: Watch | None = None) -> None:
        self.transport = transport
        self.watch = watch
        self._direct: Ways = way or DirectCollectives()
        self._hosted: Ways = way or HostedCollectives()
        self._other: Ways = way or BufferedCollectives(Eager())

    def _way(self, x: torch.Tensor, transport: Transport) -> Ways:
        if transport.is_gloo and is_on_host(x):
            return self._direct
        if transport.goes_by_host:
            return self._hosted
        if self.watch is not None:
            compare(transport)
        return self._other

    def _start(self, group: Group, op: str, x: torch.Tensor, *details: Detail) -> Under:
        """A call that is entered twice: to be begun, and to be waited for."""
        return Under(self.transport, self.watch, group, (op, x.shape, x.dtype, *details), goes_on=True)

    def all_reduce(self, x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        if group.size == 1:
            return x
        with Under(self.transport, self.watch, group, ("all_reduce", x.shape, x.dtype, ("op", op))) as transport:
            return self._way(x, transport).all_reduce(x, transport, op)

    def all_gather(self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        if group.size == 1:
            return x
        key = ("all_gather", _open(x, dim), x.dtype, ("dim", dim), ("sizes", tuple(sizes)))
        with Under(self.transport, self.watch, group, key) as transport:
            return self._way(x, transport).all_gather(x, transport, dim, sizes)

    def reduce_scatter(
        self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        if group.size == 1:
            return x
        key = ("reduce_scatter", x.shape, x.dtype, ("dim", dim), ("sizes", tuple(sizes)), ("op", op))
        with Under(self.transport, self.watch, group, key) as transport:
            return self._way(x, transport).reduce_scatter(x, transport, dim, sizes, op)

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
        key = ("all_to_all", _open(x, split, concat), x.dtype, ("split", split), ("concat", concat))
        with Under(self.transport, self.watch, group, key) as transport:
            return self._way(x, transport).all_to_all(x, transport, split, split_sizes, concat, concat_sizes)

    def broadcast(self, x: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        if group.size == 1:
            return x
        with Under(self.transport, self.watch, group, ("broadcast", x.shape, x.dtype, ("root", root))) as transport:
            return self._way(x, transport).broadcast(x, transport, root)

    def permute(self, x: torch.Tensor, group: Group, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        if group.size == 1:
            return x if pairs else torch.zeros_like(x)
        with Under(self.transport, self.watch, group, ("permute", x.shape, x.dtype, ("pairs", pairs))) as transport:
            return self._way(x, transport).permute(x, transport, pairs)

    def barrier(self, group: Group) -> None:
        if group.size > 1:
            with Under(self.transport, self.watch, group, ("barrier", None, None)) as transport:
                compare(transport)
                # Processes meet, and not their streams: no communicator of NCCL's is made for it.
                options = dist.BarrierOptions()
                options.device = torch.device("cpu")
                transport.pg.barrier(options).wait()

    # under way ------------------------------------------------------------------------------------------------

    def all_reduce_inplace(self, x: torch.Tensor, group: Group, op: ReduceOp) -> Handle:
        check_contiguous(x)
        if group.size == 1 or x.numel() == 0:
            return Done()
        if loses_nans(op, x.dtype):
            x.copy_(self.all_reduce(x, group, op))
            return Done()
        values = x.view(torch.uint8) if x.dtype == torch.bool else x.to(REDUCED_AS.get(x.dtype, x.dtype))
        call = self._start(group, "all_reduce", x, ("op", op), ("inplace", True))
        with call as transport:
            compare(transport)
            sent = copied(values) if transport.goes_by_host and not is_on_host(values) else values
            carrier = transport.messages if is_on_host(sent) else transport.pg
            work = carrier.allreduce([sent], NATIVE[op_for(op, x.dtype)])

        def finish() -> None:
            work.wait()
            if sent is not values:
                values.copy_(sent)
            if x.dtype != torch.bool and values is not x:
                x.copy_(values)
            if op == "mean":
                x.div_(group.size)

        return InFlight(finish, call)

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, group: Group, op: ReduceOp) -> Handle:
        """Starts to reduce `x` (group.size equal parts along dim 0) to `out`: this place's part by rank order.

        Both contiguous; `x` must stay as it is until the wait. Moves (n-1)/n of x.
        """
        check_contiguous(out, x)
        check_parts(out, x, group)
        if group.size == 1 or x.numel() == 0:
            out.copy_(x)
            return Done()
        call = self._start(group, "reduce_scatter", x, ("op", op), ("inplace", True))
        with call as transport:
            way = self._way(x, transport)
            if isinstance(way, DirectCollectives):
                return InFlight(scatter(transport, x.chunk(group.size), op, out), call)
            if isinstance(way, HostedCollectives):
                return InFlight(way.scatter(out, x, transport, op), call)
            if loses_nans(op, x.dtype):
                out.copy_(way.reduce_scatter(x, transport, 0, [out.shape[0]] * group.size, op))
                call.goes_on = False
                return Done()
            dtype = REDUCED_AS.get(x.dtype, x.dtype)
            part = torch.empty_like(out, dtype=dtype)
            work = reduce_scatter_single(
                part, x.to(dtype), NATIVE[op_for(op, x.dtype)], group=transport.pg, async_op=True
            )

        def finish() -> None:
            _wait(work)
            out.copy_(part / group.size if op == "mean" else part)

        return InFlight(finish, call)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Handle:
        """Starts to fill `out` with every place's `x`, joined along dim 0.

        `x` may be this place's part of `out`.

        Both contiguous, all parts of one shape; `x` must stay as it is until the wait. Moves (n-1)/n of out.
        """
        check_contiguous(out, x)
        check_parts(x, out, group)
        if group.size == 1 or x.numel() == 0:
            out.copy_(x)
            return Done()
        call = self._start(group, "all_gather", x, ("inplace", True))
        with call as transport:
            way = self._way(x, transport)
            if isinstance(way, HostedCollectives):
                return InFlight(way.collect(out, x, transport), call)
            if isinstance(way, DirectCollectives):
                parts = out.chunk(group.size)
                finish = exchange(transport, [x] * group.size, parts)
                if parts[transport.index].data_ptr() != x.data_ptr():
                    parts[transport.index].copy_(x)
                return InFlight(finish, call)
            work = all_gather_single(_bytes(out), _bytes(x), group=transport.pg, async_op=True)
        return InFlight(lambda: _wait(work), call)


def _open(x: torch.Tensor, *dims: int) -> tuple[int | None, ...]:
    """The shape of x, None along dims that may differ between the members."""
    shape: list[int | None] = list(x.shape)
    for dim in dims:
        shape[dim] = None
    return tuple(shape)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _bytes(x: torch.Tensor) -> torch.Tensor:
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
