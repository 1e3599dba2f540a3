"""Reduces and moves values in each dtype: torch's ops, and detours where a transport has a gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from unidist.algebra.layout import ReduceOp

NATIVE = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
# Reduced as another dtype: bits of bools as 0 and 1; gloo and NCCL have no int16.
REDUCED_AS = {torch.bool: torch.uint8, torch.int16: torch.int32}
# Moved as another dtype of the same size, bit by bit.
MOVED_AS = {torch.bool: torch.uint8, torch.int16: torch.bfloat16}
_OF_BOOLS: dict[ReduceOp, ReduceOp] = {"sum": "max", "max": "max", "prod": "min", "min": "min"}

FOLD: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def op_for(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """The op that reduces values of a dtype in the dtype REDUCED_AS: bools are "or"ed and "and"ed."""
    return _OF_BOOLS.get(op, op) if dtype == torch.bool else op


def loses_nans(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Returns whether gloo, NCCL and Horovod give a number where this reduction has a NaN.

    Of NaN and 1 they keep what came first, or the 1. torch's own functions keep the NaN, as NumPy's do.
    """
    return op in ("max", "min") and dtype.is_floating_point


def extreme(parts: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The max or min along dim 0, NaN where one is NaN."""
    return parts.amax(0) if op == "max" else parts.amin(0)


def fold(parts: Sequence[torch.Tensor], own: int, op: ReduceOp, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reduces two or more arrays of one shape in the order of the sequence, in their own dtype.

    All but parts[own] may be overwritten; the result is `out`, or one of them.
    """
    first, second = (1, 0) if own == 0 else (0, 1)  # the same bits: a + b is b + a
    if op == "sum" and len(parts) == 2 and out is None and parts[0].dtype != torch.bool:
        return parts[first].add_(parts[second])
    combine = FOLD[op_for(op, parts[0].dtype)]
    total = combine(parts[first], parts[second], out=parts[first] if out is None else out)
    for part in parts[2:]:
        combine(total, part, out=total)
    return total.div_(len(parts)) if op == "mean" else total
