"""Initial values in little memory: Keras's random functions hold up to eight copies of a variable.

Inside a scope a rank may hold its shards and two whole variables, no more; so the same numbers, bit for bit, are made
in place and piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from unidist.keras.patching.compat import floatx, get_device, to_torch_dtype, torch_random
from unidist.keras.patching.patches import Hook, calling, no_model
from unidist.keras.strategies import distribution as distributions
from unidist.keras.torch.context import frame

SMALL = 1 << 16
# torch fills normal numbers in blocks of 16 from one stream: pieces of whole blocks continue it.
BLOCK = 16


def hooks() -> tuple[Hook, ...]:
    """uniform and truncated_normal of Keras's torch backend, for large variables in a scope."""
    why = "large variables are drawn in place"
    return (
        Hook(torch_random, "uniform", calling(_uniform), why, needed=no_model),
        Hook(torch_random, "truncated_normal", calling(_truncated_normal), why, needed=no_model),
    )


def _is_large_and_placed(shape: Sequence[int]) -> bool:
    return (
        prod(shape) > SMALL and frame() is None and str(get_device()) != "meta" and distributions.current() is not None
    )


def _uniform(
    original: Any, shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: Any = None
) -> Any:
    """Keras's uniform, scaled in place."""
    if not _is_large_and_placed(shape):
        return original(shape, minval, maxval, dtype, seed)
    generator = torch_random.torch_seed_generator(seed)
    values = torch.rand(
        size=tuple(shape), generator=generator, dtype=to_torch_dtype(dtype or floatx()), device=get_device()
    )
    return values.mul_(maxval - minval).add_(minval)


def _truncated_normal(
    original: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None
) -> Any:
    """Keras's truncated normal, the first of four draws within two deviations, by pieces of some rows."""
    cpu = torch.device(get_device()).type == "cpu"
    if not cpu or not _is_large_and_placed(shape):
        # An accelerator's stream does not go on from piece to piece.
        return original(shape, mean, stddev, dtype, seed)
    generator = torch_random.torch_seed_generator(seed)
    values = torch.empty(tuple(shape), dtype=to_torch_dtype(dtype))
    flat = values.view(-1)
    start = 0
    while start < len(flat):
        stop = start + SMALL
        if len(flat) - stop < BLOCK:
            stop = len(flat)
        drawn = torch.normal(0, 1, size=(stop - start, 4), generator=generator, dtype=values.dtype)
        first = ((drawn > -2) & (drawn < 2)).max(-1, keepdim=True)[1]
        flat[start:stop] = drawn.gather(-1, first).squeeze(-1)
        start = stop
    return values.mul_(stddev).add_(mean)
