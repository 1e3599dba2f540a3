"""Horovod over torch: gives the primitives that the torch adapter's collectives are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from unidist import events
from unidist.algebra import Group
from unidist.algebra.layout import ReduceOp
from unidist.backends.collectives import Done
from unidist.backends.horovod import lost
from unidist.backends.horovod.comm import HorovodComm
from unidist.backends.horovod.sets import Transport
from unidist.backends.torch.buffers import BufferedCollectives
from unidist.backends.torch.comm import check_contiguous, check_parts
from unidist.backends.torch.ops import TorchOps
from unidist.backends.torch.reducing import fold, loses_nans, op_for
from unidist.errors import CapabilityError, ProcessLostError
from unidist.flight.recorder import recorder

NATIVE = {"sum": hvd.Sum, "mean": hvd.Sum, "max": hvd.Max, "min": hvd.Min, "prod": hvd.Product}
# Horovod reduces none of these; float32 holds a sum of bfloat16 better than bfloat16 does.
REDUCED_AS = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bfloat16: torch.float32,
}
# Moved as another dtype of the same size, bit by bit.
MOVED_AS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16, torch.complex64: torch.int64}
# What a rank may give at most to be gathered by a sum.
_WHOLE_NUMBERS, _FEW_BYTES = (torch.int32, torch.int64), 64
# Behind the shape of what is gathered so: no other sum has it.
_UNLIKE_OTHERS = (1, 1, 1, 1)


class Primitives:
    """Horovod's operations on contiguous tensors. See `Primitives` in backends/torch/primitives.py.

    Horovod orders a set's members by their ranks; here they are in the order of their places.

    Args:
        timeout: seconds to wait for the others.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def finish(self, handle: int, at: lost.Call, transport: Transport, name: str) -> Any:
        """Waits for an operation that was started; its result."""
        lost.wait(lost.polled(lambda: hvd.poll(handle)), at, self._timeout, hvd)
        try:
            return hvd.synchronize(handle)
        except HorovodInternalError as error:
            told = self._told(at, transport, name) if lost.disagrees(error) else b""
            raise lost.failure(error, at, told) from error

    def _told(self, at: lost.Call, transport: Transport, name: str) -> bytes:
        own = torch.frombuffer(bytearray(lost.where(at)), dtype=torch.uint8)
        try:
            handle = hvd.allgather_async(own, name=f"{name}.apart", process_set=transport.native)
            lost.wait(lost.polled(lambda: hvd.poll(handle)), at, min(self._timeout, lost.TELLING_SECONDS), hvd)
            return bytes(hvd.synchronize(handle).numpy())
        except (HorovodInternalError, ProcessLostError):
            return b""

    def start(
        self, what: str, transport: Transport, operation: Callable[..., int], *args: Any, **options: Any
    ) -> Pending:
        """Starts operation(*args, **options) over a process set.

        Raises:
            CapabilityError: a tensor that is not on a CPU.
        """
        if args and args[0].device.type != "cpu":
            raise CapabilityError(
                f"use('horovod') moves CPU tensors, and this one is on {args[0].device}: whatever Horovod was built "
                "for, bring tensors to CPUs, or use('torch') for NCCL"
            )
        at, name = lost.Call(what, transport.ranks, events.purpose()), transport.name()
        try:
            handle = operation(*args, **options, name=name, process_set=transport.native)
        except HorovodInternalError as error:
            raise lost.failure(error, at) from error
        return Pending(lambda: self.finish(handle, at, transport, name))

    def all_reduce(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.all_reduce(torch.view_as_real(x), transport, op))
        out = self.start_all_reduce(x.to(REDUCED_AS.get(x.dtype, x.dtype), copy=True), transport, op).result()
        return out.to(x.dtype)  # type: ignore[no-any-return]

    def start_all_reduce(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> Pending:
        """In place, of a dtype that Horovod reduces; the sum for a mean."""
        return self.start("all_reduce", transport, hvd.allreduce_async_, x, op=NATIVE[op])

    def all_gather(self, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        is_few = x.dtype in _WHOLE_NUMBERS and x.nbytes <= _FEW_BYTES
        joined = self._few(x, transport) if is_few else self._gathered(_carried(x), transport)
        out = _by_place(joined.view(transport.size, *x.shape), transport)
        return out.view(transport.size * x.shape[0], *x.shape[1:]).view(x.dtype)

    def _gathered(self, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        return self.start("all_gather", transport, hvd.allgather_async, x).result()  # type: ignore[no-any-return]

    def _few(self, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        """A few whole numbers, gathered by a sum: each rank gives zeros, but for its own row.

        Horovod compares what ranks do within one kind of operation. A rank in an all-gather waits for ever where
        another one is in an all-reduce. So agreements are of the kind that gradients and barriers are of.
        """
        rows = torch.zeros((transport.size, *x.shape, *_UNLIKE_OTHERS), dtype=x.dtype)
        rows[sorted(transport.ranks).index(transport.ranks[transport.index])] = x.view(*x.shape, *_UNLIKE_OTHERS)
        return self.start("all_gather", transport, hvd.allreduce_async_, rows, op=hvd.Sum).result()  # type: ignore[no-any-return]

    def reduce_scatter(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.reduce_scatter(torch.view_as_real(x), transport, op))
        parts = x.view(transport.size, -1)
        shape = (x.shape[0] // transport.size, *x.shape[1:])
        if op not in ("sum", "mean") or x.dtype in REDUCED_AS:  # what Horovod does not reduce is folded here
            counts = [parts.shape[1]] * transport.size
            came = self.all_to_all(parts.reshape(-1), transport, counts, counts)
            total = fold(list(came.view_as(parts)), transport.index, "sum" if op == "mean" else op)
            return total.clone().view(shape)
        out = self.start(
            "reduce_scatter", transport, hvd.reducescatter_async, _by_rank(parts, transport), op=hvd.Sum
        ).result()
        return out.view(shape)  # type: ignore[no-any-return]

    def all_to_all(
        self, x: torch.Tensor, transport: Transport, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        order = transport.order or range(transport.size)
        if transport.order is not None:
            pieces = x.split(list(sent))
            x = torch.cat([pieces[place] for place in order])
        splits = torch.tensor([sent[place] for place in order], dtype=torch.int32)
        came, _ = self.start("all_to_all", transport, hvd.alltoall_async, _carried(x), splits=splits).result()
        if transport.order is not None:
            pieces = came.split([received[place] for place in order])
            came = torch.cat([pieces[transport.order.index(place)] for place in range(transport.size)])
        return came.view(x.dtype)  # type: ignore[no-any-return]

    def broadcast(self, x: torch.Tensor, transport: Transport, root: int) -> torch.Tensor:
        # Horovod's root is a rank of the world, not of the process set.
        out = self.start(
            "broadcast", transport, hvd.broadcast_async, _carried(x), root_rank=transport.ranks[root]
        ).result()
        return out.view(x.dtype)  # type: ignore[no-any-return]


class Pending:
    """An operation under way."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.result = finish


class Waiting:
    """A handle; `wait` may be called more than once.

    Args:
        kind: by which this process's record knows the collective.
        start: starts it.
        finish: takes its result.
    """

    def __init__(self, kind: int, start: Callable[[], Pending], finish: Callable[[Any], object]) -> None:
        self._finish = finish
        self._pending: Pending | None = None
        self._entry = recorder.start(kind)
        try:
            self._pending = start()
        except BaseException:
            recorder.end(self._entry, failed=True)
            raise

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        recorder.wait(self._entry)
        try:
            self._finish(pending.result())
        except BaseException:
            recorder.end(self._entry, failed=True)
            raise
        recorder.end(self._entry)

    def __del__(self) -> None:
        if self._pending is not None:
            recorder.end(self._entry, failed=True)


class TorchWays(BufferedCollectives[Transport]):
    """All collectives on torch tensors.

    Uneven shards are padded; dtypes that Horovod lacks are carried by others.
    """

    def __init__(self, primitives: Primitives) -> None:
        super().__init__(primitives)
        self._horovod = primitives

    def barrier(self, transport: Transport) -> None:
        token = torch.zeros(1, dtype=torch.int32)
        self._horovod.start("barrier", transport, hvd.allreduce_async_, token, op=hvd.Sum).result()

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


class TorchComm(HorovodComm[torch.Tensor]):
    """Collectives on torch tensors, and those that Keras on torch starts and waits for later."""

    def __init__(self, transport: Callable[[Group], Transport], timeout: float) -> None:
        self._primitives = Primitives(timeout)
        super().__init__(transport, TorchWays(self._primitives))

    def all_reduce_inplace(self, x: torch.Tensor, group: Group, op: ReduceOp) -> Waiting | Done:
        """Starts to reduce a contiguous buffer in place."""
        check_contiguous(x)
        if group.size == 1 or x.numel() == 0:
            return Done()
        if loses_nans(op, x.dtype):
            x.copy_(self.all_reduce(x, group, op))
            return Done()
        values = x.to(REDUCED_AS.get(x.dtype, x.dtype))

        def start() -> Pending:
            return self._primitives.start_all_reduce(values, self.transport(group), op_for(op, x.dtype))

        def finish(_: Any) -> None:
            if values is not x:
                x.copy_(values)
            if op == "mean":
                x.div_(group.size)

        return Waiting(self.kind("all_reduce", group, x), start, finish)

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, group: Group, op: ReduceOp) -> Waiting | Done:
        """Starts to reduce `x` (group.size equal parts along dim 0) to `out`: this place's part by rank order.

        Both contiguous; `x` must stay as it is until the wait. Moves (n-1)/n of x.

        Raises:
            CapabilityError: an op other than sum and mean, which Horovod scatters none of.
        """
        check_contiguous(out, x)
        check_parts(out, x, group)
        if group.size == 1 or x.numel() == 0:
            out.copy_(x)
            return Done()
        if op not in ("sum", "mean"):
            raise CapabilityError(f"Horovod cannot reduce_scatter by {op}: use all_reduce, or sum or mean")
        transport, dtype = self.transport(group), REDUCED_AS.get(x.dtype, x.dtype)
        parts = _by_rank(x.to(dtype).view(transport.size, -1), transport)

        def start() -> Pending:
            return self._primitives.start("reduce_scatter", transport, hvd.reducescatter_async, parts, op=hvd.Sum)

        def finish(part: torch.Tensor) -> None:
            out.copy_((part / group.size if op == "mean" else part).view(out.shape))

        return Waiting(self.kind("reduce_scatter", group, x), start, finish)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Waiting | Done:
        """Starts to fill `out` with every place's `x`, joined along dim 0.

        `x` may be this place's part of `out`.

        Both contiguous, all parts of one shape; `x` must stay as it is until the wait. Moves (n-1)/n of out.
        """
        check_contiguous(out, x)
        check_parts(x, out, group)
        if group.size == 1 or x.numel() == 0:
            out.copy_(x)
            return Done()
        transport = self.transport(group)

        def start() -> Pending:
            return self._primitives.start("all_gather", transport, hvd.allgather_async, _carried(x))

        def finish(joined: torch.Tensor) -> None:
            _carried(out).copy_(_by_place(joined.view(transport.size, -1), transport).view(out.shape))

        return Waiting(self.kind("all_gather", group, x), start, finish)


def make_comm(transport: Callable[[Group], Transport], timeout: float) -> TorchComm:
    return TorchComm(transport, timeout)


def make_ops() -> TorchOps:
    return TorchOps()


def _carried(x: torch.Tensor) -> torch.Tensor:
    return x.view(MOVED_AS[x.dtype]) if x.dtype in MOVED_AS else x


def _by_rank(rows: torch.Tensor, transport: Transport) -> torch.Tensor:
    return rows if transport.order is None else rows[list(transport.order)]


def _by_place(rows: torch.Tensor, transport: Transport) -> torch.Tensor:
    if transport.order is None:
        return rows
    return rows[[transport.order.index(place) for place in range(transport.size)]]
