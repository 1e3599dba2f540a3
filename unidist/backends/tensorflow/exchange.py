"""The exchanges that every move is made of, as DTensor programs.

Their mesh has two axes: groups, and places in a group.

Each rank gives a flat tensor; what goes over the wire is one DTensor, whose first two dims are sharded over the mesh.
Lengths are rounded up, so that few programs serve all shapes: making one takes longer than running it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist.algebra.layout import ReduceOp

Parts: TypeAlias = dict[int, Any]
Kind = Literal["gather", "reduce", "pick", "scatter", "send", "swap"]
# As others name what they are parts of.
OP: dict[Kind, str] = {
    "gather": "all_gather",
    "reduce": "all_reduce",
    "pick": "broadcast",
    "scatter": "reduce_scatter",
    "send": "permute",
    "swap": "all_to_all",
}
# What only moves: of `pick` all but one of a group hold zeros, as do all but one of what `send` brings to a place.
_MOVED_BY: dict[Kind, Kind] = {"gather": "gather", "pick": "reduce", "send": "scatter", "swap": "swap"}
U = dtensor.UNSHARDED

# DTensor's collectives on CPU lack some of these; 32-bit integers hold all their values and wrap as they do.
_CARRIED = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32}
_REDUCE: dict[ReduceOp, Callable[..., Any]] = {
    "sum": tf.reduce_sum,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": tf.reduce_prod,
}
_OF_BOOL: dict[ReduceOp, ReduceOp] = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
# Programs of one process start in one order on all devices; two threads at once could interleave them.
_one_at_a_time = threading.Lock()


@lru_cache(maxsize=4096)
def _program(kind: Kind, op: ReduceOp, mesh: dtensor.Mesh) -> Callable[[Any], Any]:
    """Makes a program of one kind, in which each rank gives and gets a tensor.

    gather [o,g,L] -> [n,L]; reduce [o,g,L] -> [L]; scatter [o,g,n,C] -> [C]; swap [o,g,nC] -> [n,C]; each.
    """

    def gather(x: Any) -> Any:
        return dtensor.relayout(x, dtensor.Layout(["o", U, U], mesh))

    def reduce(x: Any) -> Any:
        return dtensor.relayout(_REDUCE[op](x, axis=1), dtensor.Layout(["o", U], mesh))

    def scatter(x: Any) -> Any:
        return dtensor.relayout(_REDUCE[op](x, axis=1), dtensor.Layout(["o", "g", U], mesh))

    def swap(x: Any) -> Any:
        # With one dim for both: of four dims DTensor's all_to_all misorders what it moves.
        return dtensor.relayout(x, dtensor.Layout(["o", U, "g"], mesh))

    body = {"gather": gather, "reduce": reduce, "scatter": scatter, "swap": swap}[kind]
    programs: dict[Any, Callable[[Any], Any]] = {}

    def run(x: Any) -> Any:
        # One tf.function for each kind of argument: TensorFlow warns of a function that is traced often.
        key = (x.dtype, tuple(x.shape))
        if key not in programs:
            programs[key] = tf.function(functools.partial(body), autograph=False)
        return programs[key](x)

    return run


def rounded(length: int) -> int:
    """A length to which others round up too: a power of two, and multiples of 4096 beyond."""
    return 1 << max(4, (length - 1).bit_length()) if length <= 4096 else -(-length // 4096) * 4096


def exchange(kind: Kind, mesh: dtensor.Mesh, ranks: tuple[int, ...], parts: Mapping[int, Any], op: ReduceOp) -> Parts:
    """Runs one exchange.

    DTensor gathers and moves by sums with zeros on CPU, in which the float -0 becomes 0: there the bits of floats are
    moved, as integers that take as many bytes.

    Args:
        mesh: [groups, places]; its local devices hold `ranks`, in this order.
        parts: for each of these ranks its tensor: [L] for gather, reduce and pick, [n, C] for scatter, send and swap,
            where L and C are the same on all ranks of the mesh, and even.

    Returns:
        rank -> what `_program` says; of pick and send what it says of reduce and scatter.
    """
    dtype = next(iter(parts.values())).dtype
    if kind not in _MOVED_BY:
        return _exchanged(kind, mesh, ranks, parts, op)
    bits = dtype.is_floating and mesh.device_type().upper() == "CPU"
    sent = {rank: _bits(part) for rank, part in parts.items()} if bits else parts
    found = _exchanged(_MOVED_BY[kind], mesh, ranks, sent, "sum")
    return {rank: _floats(part, dtype) for rank, part in found.items()} if bits else found


def _bits(x: Any) -> Any:
    """The same bits as integers of 32 or 64 bits: DTensor has none of 16."""
    if x.dtype.size == 2:
        x = tf.reshape(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
    return tf.bitcast(x, tf.int64 if x.dtype.size == 8 else tf.int32)


def _floats(bits: Any, dtype: Any) -> Any:
    found = tf.bitcast(bits, dtype)
    return tf.reshape(found, (*bits.shape[:-1], -1)) if dtype.size == 2 else found


def _exchanged(kind: Kind, mesh: dtensor.Mesh, ranks: tuple[int, ...], parts: Mapping[int, Any], op: ReduceOp) -> Parts:
    dtype = next(iter(parts.values())).dtype
    carried = _CARRIED.get(dtype, dtype)
    if dtype == tf.bool:
        op = _OF_BOOL.get(op, op)
    held = [parts[rank][tf.newaxis, tf.newaxis] for rank in ranks]
    if kind == "swap":
        held = [tf.reshape(part, (1, 1, -1)) for part in held]
    if carried != dtype:
        held = [tf.cast(part, carried) for part in held]
    specs = ["o", "g", *[U] * (len(held[0].shape) - 2)]
    with _one_at_a_time, dtensor.default_mesh(mesh):
        found = dtensor.unpack(_program(kind, op, mesh)(dtensor.pack(held, dtensor.Layout(specs, mesh))))
    shapes = {"gather": (0,), "reduce": (0,), "scatter": (0, 1), "swap": (0,)}[kind]
    out = {}
    for rank, part in zip(ranks, found, strict=True):
        local = tf.squeeze(part, shapes)
        out[rank] = local if carried == dtype else tf.cast(local, dtype)
    return out
