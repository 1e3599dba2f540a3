"""Horovod over TensorFlow: collectives on eager CPU tensors, and what a rank does with its own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from unidist import events
from unidist.algebra import Group, chunk
from unidist.algebra.layout import ReduceOp
from unidist.backends.horovod import lost
from unidist.backends.horovod.comm import HorovodComm
from unidist.backends.horovod.sets import Transport
from unidist.backends.protocol import Array, plain_array
from unidist.backends.tensorflow.devices import hide_gpus
from unidist.errors import CapabilityError, ProcessLostError

Tensor = Any  # tf.Tensor; TensorFlow has no types
Move = Callable[[Tensor], Tensor]

NATIVE = {"sum": hvd.Sum, "mean": hvd.Sum, "max": hvd.Max, "min": hvd.Min, "prod": hvd.Product}
# Horovod reduces none of these; float32 holds a sum of bfloat16 better than bfloat16 does.
REDUCED_AS = {
    tf.bool: tf.int32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.bfloat16: tf.float32,
}
# Bits are "or"ed and "and"ed as 0 and 1.
_OF_BOOLS: dict[ReduceOp, ReduceOp] = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
_FOLD: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": tf.add,
    "mean": tf.add,
    "max": tf.maximum,
    "min": tf.minimum,
    "prod": tf.multiply,
}
_FOLD_BOOLS: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": tf.logical_or,
    "max": tf.logical_or,
    "min": tf.logical_and,
    "prod": tf.logical_and,
}


class Waiter:
    """Runs one operation after the other in a thread beside, and gives up one that does not end.

    Horovod's operations on eager tensors return when all members have come, and have no deadline.

    Args:
        timeout: seconds to wait for the others.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None

    def __call__(
        self, what: str, transport: Transport, operation: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """operation(*args, **options) over a process set.

        Raises:
            ProcessLostError: another member ended or did not come in time.
            DesyncError: the members came with different shapes or dtypes.
        """
        at = lost.Call(what, transport.ranks, events.purpose())
        if self._work is None:
            self._work = _start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        answers: list[Any] = []
        name = transport.name()
        self._work.put((lambda: operation(*args, **options, name=name, process_set=transport.native), answer))

        def has_come(seconds: float) -> bool:
            with contextlib.suppress(queue.Empty):
                answers.append(answer.get(timeout=seconds))
            return bool(answers)

        try:
            lost.wait(has_come, at, self._timeout, hvd)
        except ProcessLostError:
            self._work = None  # that thread is in Horovod for good
            raise
        result, error = answers[0]
        if isinstance(error, tf.errors.FailedPreconditionError | tf.errors.InvalidArgumentError | HorovodInternalError):
            raise lost.failure(HorovodInternalError(_words(error)), at) from error
        if isinstance(error, tf.errors.UnknownError | tf.errors.AbortedError | tf.errors.CancelledError):
            raise lost.failure(HorovodInternalError(_words(error)), at) from error
        if error is not None:
            raise error
        return result


def _words(error: Exception) -> str:
    return str(getattr(error, "message", error)).partition("}} ")[2] or str(error)


def _start() -> queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]:
    work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            operation, answer = work.get()
            try:
                # No tape of the caller's is here: Horovod's own gradients are never recorded.
                with tf.device("CPU:0"):
                    answer.put((operation(), None))
            except Exception as error:  # raised in the caller's thread
                answer.put((None, error))

    threading.Thread(target=serve, daemon=True).start()
    return work


class TensorFlowWays:
    """All collectives on eager tensors. Shards of any size are sent flat, as they are.

    A reduce_scatter is an exchange of parts (all_to_all), each folded in the order of the places: Horovod scatters
    sums of equal parts only. It moves as many bytes.
    """

    def __init__(self, timeout: float) -> None:
        self._do = Waiter(timeout)

    def all_reduce(self, x: Tensor, transport: Transport, op: ReduceOp) -> Tensor:
        if prod(x.shape) == 0:
            return x
        if op in ("max", "min") and x.dtype.is_floating:
            return self._all_reduce_in_parts(x, transport, op)
        native = NATIVE[_OF_BOOLS.get(op, op) if x.dtype == tf.bool else op]
        values = tf.cast(x, REDUCED_AS.get(x.dtype, x.dtype))
        out = tf.cast(self._do("all_reduce", transport, hvd.allreduce, values, op=native), x.dtype)
        return out / transport.size if op == "mean" else out

    def _all_reduce_in_parts(self, x: Tensor, transport: Transport, op: ReduceOp) -> Tensor:
        """Reduces one part of all at each place, then joins them: Horovod's own max and min lose NaN.

        Sends 2(n-1)/n of x, as a ring's all_reduce does.
        """
        flat = tf.reshape(x, [-1])
        sizes = [length for _, length in chunk(int(flat.shape[0]), transport.size)]
        own = self.reduce_scatter(flat, transport, 0, sizes, op)
        return tf.reshape(self.all_gather(own, transport, 0, sizes), x.shape)

    def all_gather(self, x: Tensor, transport: Transport, dim: int, sizes: Sequence[int]) -> Tensor:
        shapes = [_resized(x, {dim: n}) for n in sizes]
        counts = [prod(shape) for shape in shapes]
        if sum(counts) == 0:
            return tf.zeros(_resized(x, {dim: sum(sizes)}), x.dtype)
        joined = self._do("all_gather", transport, hvd.allgather, _carried(x))
        pieces = tf.split(joined, [counts[place] for place in _order(transport)])
        return self._joined(pieces, shapes, transport, dim, x.dtype)

    def reduce_scatter(self, x: Tensor, transport: Transport, dim: int, sizes: Sequence[int], op: ReduceOp) -> Tensor:
        shape = _resized(x, {dim: sizes[transport.index]})
        if prod(x.shape) == 0:
            return tf.zeros(shape, x.dtype)
        parts = [tf.reshape(part, [-1]) for part in tf.split(x, list(sizes), dim)]
        came = self._exchange("reduce_scatter", transport, parts, [prod(shape)] * transport.size, x.dtype)
        out = reduce((_FOLD_BOOLS if x.dtype == tf.bool else _FOLD)[op], came)
        return tf.reshape(out / transport.size if op == "mean" else out, shape)

    def all_to_all(
        self,
        x: Tensor,
        transport: Transport,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> Tensor:
        own = split_sizes[transport.index]
        # What the group holds together decides whether anyone sends anything: all members must decide alike.
        if prod(_resized(x, {concat: sum(concat_sizes)})) == 0:
            return tf.zeros(_resized(x, {split: own, concat: sum(concat_sizes)}), x.dtype)
        shapes = [_resized(x, {split: own, concat: n}) for n in concat_sizes]
        parts = [tf.reshape(part, [-1]) for part in tf.split(x, list(split_sizes), split)]
        came = self._exchange("all_to_all", transport, parts, [prod(shape) for shape in shapes], x.dtype)
        return tf.concat([tf.reshape(p, shape) for p, shape in zip(came, shapes, strict=True)], concat)

    def broadcast(self, x: Tensor, transport: Transport, root: int) -> Tensor:
        if prod(x.shape) == 0:
            return x
        # Horovod's root is a rank of the world, not of the process set.
        out = self._do("broadcast", transport, hvd.broadcast, _carried(x), root_rank=transport.ranks[root])
        return tf.reshape(_restored(out, x.dtype), x.shape)

    def permute(self, x: Tensor, transport: Transport, pairs: tuple[tuple[int, int], ...]) -> Tensor:
        if prod(x.shape) == 0 or not pairs:
            return tf.zeros_like(x)
        nothing, flat = tf.zeros([0], x.dtype), tf.reshape(x, [-1])
        sent, received = [nothing] * transport.size, [0] * transport.size
        for source, destination in pairs:
            if source == transport.index:
                sent[destination] = flat
            if destination == transport.index:
                received[source] = prod(x.shape)
        came = self._exchange("permute", transport, sent, received, x.dtype)
        return tf.reshape(tf.concat(came, 0), x.shape) if any(received) else tf.zeros_like(x)

    def barrier(self, transport: Transport) -> None:
        self._do("barrier", transport, hvd.allreduce, tf.zeros([1], tf.int32), op=hvd.Sum)

    def zeros_like(self, x: Tensor) -> Tensor:
        return tf.zeros_like(x)

    def _exchange(
        self, what: str, transport: Transport, parts: Sequence[Tensor], counts: Sequence[int], dtype: Any
    ) -> list[Tensor]:
        """parts[k] to place k; what came from each place, as long as `counts` says."""
        order = _order(transport)
        sent = _carried(tf.concat([parts[place] for place in order], 0))
        splits = tf.constant([int(parts[place].shape[0]) for place in order], tf.int32)
        came, _ = self._do(what, transport, hvd.alltoall, sent, splits=splits)
        pieces = tf.split(_restored(came, dtype), [counts[place] for place in order])
        return [pieces[order.index(place)] for place in range(transport.size)]

    def _joined(
        self, pieces: Sequence[Tensor], shapes: Sequence[list[int]], transport: Transport, dim: int, dtype: Any
    ) -> Tensor:
        order = _order(transport)
        by_place = [pieces[order.index(place)] for place in range(transport.size)]
        return tf.concat(
            [tf.reshape(_restored(p, dtype), shape) for p, shape in zip(by_place, shapes, strict=True)], dim
        )


class TensorFlowOps:
    """LocalOps over eager tensors on CPU."""

    def from_numpy(self, value: Any) -> Tensor:
        if isinstance(value, tf.Tensor | tf.Variable):
            return tf.convert_to_tensor(value)
        with tf.device("CPU:0"):
            return tf.constant(plain_array(value))

    def to_numpy(self, x: Tensor) -> Array:
        return np.array(x.numpy())

    def cut(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        begin = [start if d == dim else 0 for d in range(len(x.shape))]
        return tf.slice(x, begin, _resized(x, {dim: length}))

    def embed(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        after = length - start - x.shape[dim]
        zeros = [tf.zeros(_resized(x, {dim: n}), x.dtype) for n in (start, after)]
        return tf.concat([zeros[0], x, zeros[1]], dim)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor in the dtype of x. Raises CapabilityError: a fraction of an integer or bool tensor."""
        if x.dtype.is_floating:
            return x * tf.cast(factor, x.dtype)
        if factor != int(factor):
            raise CapabilityError(
                f"a mean over ranks scales by {factor}, which {x.dtype.name} cannot hold: cast to a floating dtype "
                "first"
            )
        return tf.cast(tf.cast(x, tf.int64) * int(factor), x.dtype)

    def full_like(self, x: Tensor, op: ReduceOp) -> Tensor:
        return tf.cast(tf.fill(x.shape, op == "prod"), x.dtype)

    def differentiable(self, forward: Move, backward: Move, x: Tensor) -> Tensor:
        """forward(x), whose gradient is backward(gradient), and so on for gradients of gradients.

        Raises:
            CapabilityError: inside tf.function, which would make a collective of a trace.
        """
        if not tf.executing_eagerly():
            raise CapabilityError(
                "use('horovod') moves eager tensors: inside tf.function call it through tf.py_function"
            )

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def move(value: Tensor) -> tuple[Tensor, Move]:
            return forward(value), lambda gradient: self.differentiable(backward, forward, gradient)

        return move(x)


def _resized(x: Tensor, sizes: dict[int, int]) -> list[int]:
    return [sizes.get(dim, n) for dim, n in enumerate(x.shape)]


def _order(transport: Transport) -> tuple[int, ...]:
    return transport.order or tuple(range(transport.size))


def _carried(x: Tensor) -> Tensor:
    """The same bits, flat, in a dtype that Horovod moves."""
    flat = tf.reshape(x, [-1])
    if x.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    return tf.bitcast(flat, tf.int16) if x.dtype == tf.bfloat16 else flat


def _restored(x: Tensor, dtype: Any) -> Tensor:
    if dtype == tf.bool:
        return tf.cast(x, tf.bool)
    return tf.bitcast(x, tf.bfloat16) if dtype == tf.bfloat16 else x


def make_comm(transport: Callable[[Group], Transport], timeout: float) -> HorovodComm[Tensor]:
    return HorovodComm(transport, TensorFlowWays(timeout))


def make_ops() -> TensorFlowOps:
    hide_gpus("use('horovod') computes on CPUs")
    return TensorFlowOps()
