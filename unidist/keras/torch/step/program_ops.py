"""Holds operations that a program takes whole: they draw numbers by a seed's state, or copy a number.

Imported where a program is traced: to make such an operation takes torch as long as the rest of a driver's imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.keras.patching.compat import to_torch_dtype, torch_random


def _generator(seed: torch.Tensor, device: torch.device) -> torch.Generator:
    """As Keras seeds it."""
    first, second = seed
    generator = torch.Generator(device=device)
    generator.manual_seed(int(first + second) & 0xFFFFFFFF)
    return generator


@torch.library.custom_op("unidist::drawn", mutates_args=())
def drawn(
    seed: torch.Tensor,
    kind: str,
    low: float,
    high: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    said: dict[str, Any] = {"generator": _generator(seed, device), "dtype": dtype, "device": device}
    if kind == "normal":
        return torch.normal(low, high, size=list(shape), **said)
    if kind == "rand":
        return torch.rand(size=list(shape), **said)
    return torch.randint(int(low), int(high), size=list(shape), **said)


# A fake tensor has the arguments of the operation, by their names.
drawn.register_fake(lambda seed, kind, low, high, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))


@torch.library.custom_op("unidist::sampled", mutates_args=())
def sampled(
    seed: torch.Tensor, name: str, given: Sequence[torch.Tensor], shape: Sequence[int], dtype: str
) -> torch.Tensor:
    """Draws as Keras does by a distribution's numbers; nothing goes back to them."""
    first, second = seed
    number = int(first + second)
    if name == "categorical":
        found: torch.Tensor = torch_random.categorical(*given, shape[-1], dtype, number)
    else:
        found = getattr(torch_random, name)(tuple(shape), *given, dtype, number)
    return found


@sampled.register_fake
def _sampled_shape(
    seed: torch.Tensor, name: str, given: Sequence[torch.Tensor], shape: Sequence[int], dtype: str
) -> torch.Tensor:
    return given[0].new_empty(list(shape), dtype=to_torch_dtype(dtype))


@torch.library.custom_op("unidist::kept_units", mutates_args=())
def kept_units(seed: torch.Tensor, probability: float, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns which units a dropout keeps."""
    chances = torch.full(list(shape), probability, device=device)
    return torch.bernoulli(chances, generator=_generator(seed, device)).bool()


@kept_units.register_fake
def _kept_units_shape(
    seed: torch.Tensor, probability: float, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    return torch.empty(list(shape), dtype=torch.bool, device=device)


@torch.library.custom_op("unidist::number", mutates_args=())
def _number(x: torch.Tensor) -> torch.Tensor:
    """A number that a compiler does not look into."""
    return x.clone()


_number.register_fake(torch.empty_like)
NUMBER = torch.ops.unidist.number.default
