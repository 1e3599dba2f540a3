"""Computes one device's numbers from parts of a batch: batch statistics, added losses, seeds.

Pure functions of the tensors of any Keras backend; what they need of the other shards is asked of the engine's own
collective. What only one engine needs stays with it: denominators of losses and states of metrics are made global on
torch alone (torch/carrying.py, torch/step/metrics.py), as the others compute both from whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unidist.keras.patching.compat import backend, ops

Tensor = Any  # of the Keras backend in use

# Seeds are combined modulo 2**32; the golden ratio spreads the shards' streams over it.
_SEED_STRIDE = 0x9E3779B1


def moments(
    x: Tensor,
    dims: Sequence[int],
    mask: Tensor | None,
    add: Callable[[Tensor, Any], Tensor],
    of_shards: Callable[[list[Tensor]], Iterable[Tensor]],
) -> tuple[Tensor, Tensor]:
    """Mean and variance over `dims` of the rows of all shards.

    The shards' (count, mean, squared deviation) are combined as in Chan, Golub and LeVeque (1979), which loses no
    digits where the mean is large against the deviation.

    Args:
        mask: which places of x count, without its last dim; None: all.
        add: the framework's sum over dims. Keras's own takes longer on torch than what it sums in a small layer.
        of_shards: gives of each tensor those of all shards, stacked; differentiable.
    """
    if mask is None:
        weight, tiny = ops.ones_like(x), 0.0
    else:
        weight = ops.cast(ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(x)), x.dtype)
        tiny = backend.epsilon()
    kept = tuple(None if dim in dims else slice(None) for dim in range(len(x.shape)))
    count = add(weight, dims)
    # 0 ** 0 is 1: a shard without rows has a mean of zero, not of no number.
    mean = add(x * weight, dims) / (count + 0.0**count)
    deviation = add((x - mean[kept]) ** 2 * weight, dims)
    counts, means, deviations = of_shards([count, mean, deviation])
    total = add(counts, 0) + tiny
    overall = add(counts * means, 0) / total
    return overall, add(deviations + counts * (means - overall) ** 2, 0) / total


def by_share(value: Tensor, share: Any) -> Tensor:
    """Counts a mean over a shard's rows, or a number that depends on no rows, by its share of the rows.

    The shares of all add up to one.

    A mean over no rows is not a number, and counts nothing. It stays in the graph: all ranks must come to what backward
    does, as to fetch the values that it reads.
    """
    part, some = value * share, share > 0
    # A program of TensorFlow's knows no more of a share than that it is a number.
    return part if some is True else ops.where(some, part, ops.zeros_like(part))


def seed_offset(place: int) -> int:
    """Returns what is added to a seed, so that the shard at a place draws its own; the first adds nothing."""
    return (place * _SEED_STRIDE) & 0x7FFFFFFF
