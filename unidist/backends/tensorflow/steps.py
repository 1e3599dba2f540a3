"""The steps of a plan: what each rank does by itself around the exchanges."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import tensorflow as tf

from unidist.algebra import Axes, Mesh, Sharding, Step
from unidist.algebra.layout import ReduceOp
from unidist.backends.tensorflow.arrays import largest, padded
from unidist.backends.tensorflow.exchange import Kind, Parts, rounded

# (kind, axes, flat parts, op) -> what each rank of this process gets.
Exchange: TypeAlias = Callable[[Kind, Axes, Parts, ReduceOp], Parts]


def run(step: Step, parts: Parts, exchange: Exchange) -> Parts:
    """The parts at step.after of the parts at step.before, for this process's ranks."""
    if step.group_size == 1 and step.op != "scale":
        return parts
    if step.op in _COLLECTIVE:
        return _COLLECTIVE[step.op](step, parts, exchange)
    return {rank: _LOCAL[step.op](step, rank, part) for rank, part in parts.items()}


def by_rank(mesh: Mesh, axes: Axes, rank: int, rows: Any) -> Any:
    """Rows for the places of a rank's group, in the order of the ranks that stand there."""
    ranks = mesh.group(axes, rank).ranks
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return rows if order == list(range(len(ranks))) else tf.gather(rows, order)


def by_place(mesh: Mesh, axes: Axes, rank: int, rows: Any) -> Any:
    """The inverse of `by_rank`."""
    ranks = mesh.group(axes, rank).ranks
    order = [sorted(ranks).index(other) for other in ranks]
    return rows if order == list(range(len(ranks))) else tf.gather(rows, order)


def _flat(part: Any, length: int) -> Any:
    return padded(tf.reshape(part, (-1,)), (length,))


def _back(flat: Any, shape: tuple[int, ...]) -> Any:
    return tf.reshape(flat[: prod(shape)], shape)


def _all_reduce(step: Step, parts: Parts, exchange: Exchange) -> Parts:
    return all_reduce(step.before, step.axes, parts, exchange, step.reduce)


def all_reduce(
    sharding: Sharding, axes: Axes, parts: Parts, exchange: Exchange, op: ReduceOp, kind: Kind = "reduce"
) -> Parts:
    """Every place of a group gets the reduced part."""
    length = rounded(prod(largest(sharding)))
    found = exchange(kind, axes, {rank: _flat(part, length) for rank, part in parts.items()}, op)
    return {rank: _back(flat, parts[rank].shape) for rank, flat in found.items()}


def _all_gather(step: Step, parts: Parts, exchange: Exchange) -> Parts:
    before, mesh = step.before, step.before.mesh
    length = rounded(prod(largest(before)))
    found = exchange("gather", step.axes, {rank: _flat(part, length) for rank, part in parts.items()}, "sum")
    out = {}
    for rank, rows in found.items():
        members = mesh.group(step.axes, rank).ranks
        pieces = [_back(rows[k], before.local_shape(member)) for k, member in enumerate(members)]
        out[rank] = tf.concat(pieces, step.dim)
    return out


def _sent(part: Any, dim: int, sizes: tuple[int, ...], length: int) -> Any:
    """[n, length]: the pieces of a part along a dim, flat."""
    return tf.stack([_flat(piece, length) for piece in tf.split(part, sizes, dim)])


def _reduce_scatter(step: Step, parts: Parts, exchange: Exchange) -> Parts:
    after = step.after
    length = rounded(prod(largest(after)))
    sent = {r: _sent(part, step.dim, after.pieces(r, step.dim, step.axes), length) for r, part in parts.items()}
    found = exchange("scatter", step.axes, sent, step.reduce)
    return {rank: _back(flat, after.local_shape(rank)) for rank, flat in found.items()}


def _all_to_all(step: Step, parts: Parts, exchange: Exchange) -> Parts:
    before, after = step.before, step.after
    piece = list(largest(before))
    piece[step.to] = largest(after)[step.to]
    length = rounded(prod(piece))
    sent = {r: _sent(part, step.to, after.pieces(r, step.to, step.axes), length) for r, part in parts.items()}
    out = {}
    for rank, rows in exchange("swap", step.axes, sent, "sum").items():
        shape, joined = list(after.local_shape(rank)), []
        for k, size in enumerate(before.pieces(rank, step.dim, step.axes)):
            shape[step.dim] = size
            joined.append(_back(rows[k], tuple(shape)))
        out[rank] = tf.concat(joined, step.dim)
    return out


def broadcast(sharding: Sharding, axes: Axes, root: int, parts: Parts, exchange: Exchange) -> Parts:
    """Gives every place the root's part: a sum with zeros for all others, as DTensor has no broadcast."""
    return all_reduce(sharding, axes, only_from(sharding, axes, root, parts), exchange, "sum", "pick")


def only_from(sharding: Sharding, axes: Axes, root: int, parts: Parts) -> Parts:
    """The root's part, zeros elsewhere."""
    mesh = sharding.mesh
    return {r: part if mesh.group(axes, r).index == root else tf.zeros_like(part) for r, part in parts.items()}


def permute(
    sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...], parts: Parts, exchange: Exchange
) -> Parts:
    """Moves parts from place to place: a reduce-scatter of mostly zeros.

    DTensor has no point-to-point moves.
    """
    mesh, length = sharding.mesh, rounded(prod(largest(sharding)))
    count, goes = mesh.axis_size(axes), dict(pairs)
    sent = {}
    for rank, part in parts.items():
        flat = _flat(part, length)
        there = goes.get(mesh.group(axes, rank).index)
        sent[rank] = tf.stack([flat if k == there else tf.zeros_like(flat) for k in range(count)])
    found = exchange("send", axes, sent, "sum")
    return {rank: _back(flat, parts[rank].shape) for rank, flat in found.items()}


# what a rank does alone


def _slice(step: Step, rank: int, part: Any) -> Any:
    sizes = step.after.pieces(rank, step.dim, step.axes)
    return tf.split(part, sizes, step.dim)[step.before.mesh.group(step.axes, rank).index]


def _embed(step: Step, rank: int, part: Any) -> Any:
    sizes = step.before.pieces(rank, step.dim, step.axes)
    index = step.before.mesh.group(step.axes, rank).index
    around = [(0, 0)] * len(part.shape)
    around[step.dim] = (sum(sizes[:index]), sum(sizes[index + 1 :]))
    return tf.pad(part, around)


def _mask(step: Step, rank: int, part: Any) -> Any:
    if step.reduce not in ("sum", "prod") or not step.before.mesh.group(step.axes, rank).index:
        return part
    return tf.zeros_like(part) if step.reduce == "sum" else tf.ones_like(part)


def _retype(step: Step, rank: int, part: Any) -> Any:
    return part


def _scale(step: Step, rank: int, part: Any) -> Any:
    return part * tf.cast(step.factor, part.dtype)


_COLLECTIVE = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
_LOCAL: dict[str, Callable[[Step, int, Any], Any]] = {
    "slice": _slice,
    "embed": _embed,
    "mask": _mask,
    "retype": _retype,
    "scale": _scale,
}
