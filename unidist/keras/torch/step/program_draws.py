"""Draws random numbers in programs, by operations that take a seed's state as a tensor.

The numbers are those that Keras draws. A program can hold no generator, so each of these operations is one of its
own (program_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist.keras import needs
from unidist.keras.patching.compat import draw_seed, floatx, get_device, to_torch_dtype, torch_core, torch_random
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import context


def hooks() -> Iterator[Hook]:
    drawings: list[Callable[..., Any]] = [_normal, _uniform, _randint, _shuffle, _categorical, _gamma, _beta, _binomial]
    for drawing in drawings:
        name = drawing.__name__.removeprefix("_")
        yield Hook(torch_random, name, calling(drawing), "random numbers of a program", needed=needs.draws)


def dropout(inputs: torch.Tensor, rate: float, noise_shape: Any, seed: Any) -> torch.Tensor:
    """The units that Keras's dropout keeps with the same seed."""
    shape = [size if n is None else n for n, size in zip(noise_shape, inputs.shape, strict=True)]
    kept = torch.broadcast_to(_ops().kept_units(draw_seed(seed), 1.0 - rate, shape, inputs.device), inputs.shape)
    return torch.where(kept, inputs / (1.0 - rate), torch.zeros_like(inputs))


def _ops() -> Any:
    from unidist.keras.torch.step import program_ops

    return program_ops


def _is_traced(*numbers: Any) -> bool:
    """Returns whether a program is traced, and draws with constants."""
    here = context.frame()
    return here is not None and here.is_tracing and not any(isinstance(x, torch.Tensor) for x in numbers)


def _normal(
    original: Any, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
) -> torch.Tensor:
    if not _is_traced(mean, stddev):
        return original(shape, mean, stddev, dtype, seed)  # type: ignore[no-any-return]
    return _draw("normal", mean, stddev, shape, dtype or floatx(), seed)


def _uniform(
    original: Any, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
) -> torch.Tensor:
    if not _is_traced():
        return original(shape, minval, maxval, dtype, seed)  # type: ignore[no-any-return]
    numbers = _draw("rand", 0.0, 1.0, shape, dtype or floatx(), seed)
    return (maxval - minval) * numbers + minval  # type: ignore[no-any-return]


def _randint(original: Any, shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
    if not _is_traced(minval, maxval):
        return original(shape, minval, maxval, dtype, seed)
    return _draw("randint", minval, maxval, shape, dtype, seed)


def _shuffle(original: Any, x: Any, axis: int = 0, seed: Any = None) -> torch.Tensor:
    if not _is_traced():
        return original(x, axis, seed)  # type: ignore[no-any-return]
    x = torch_core.convert_to_tensor(x)
    order = _draw("rand", 0.0, 1.0, x.shape[: axis + 1], "float32", seed).argsort(axis)
    found: torch.Tensor = x.gather(axis, order.reshape(*order.shape, *[1] * (x.ndim - axis - 1)).expand(x.shape))
    return found


def _categorical(original: Any, logits: Any, num_samples: int, dtype: Any = "int32", seed: Any = None) -> Any:
    if not _is_traced():
        return original(logits, num_samples, dtype, seed)
    logits = torch_core.convert_to_tensor(logits)
    return _ops().sampled(draw_seed(seed), "categorical", [logits], [*logits.shape[:-1], num_samples], dtype)


def _gamma(original: Any, shape: Any, alpha: Any, dtype: Any = None, seed: Any = None) -> torch.Tensor:
    return _of_shape(original, "gamma", shape, [alpha], dtype, seed)


def _beta(original: Any, shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None) -> torch.Tensor:
    return _of_shape(original, "beta", shape, [alpha, beta], dtype, seed)


def _binomial(
    original: Any, shape: Any, counts: Any, probabilities: Any, dtype: Any = None, seed: Any = None
) -> torch.Tensor:
    return _of_shape(original, "binomial", shape, [counts, probabilities], dtype, seed)


def _of_shape(original: Any, name: str, shape: Any, given: list[Any], dtype: Any, seed: Any) -> torch.Tensor:
    if not _is_traced():
        return original(shape, *given, dtype, seed)  # type: ignore[no-any-return]
    numbers = [torch_core.convert_to_tensor(x) for x in given]
    found: torch.Tensor = _ops().sampled(draw_seed(seed), name, numbers, list(shape), dtype or floatx())
    return found


def _draw(kind: str, low: float, high: float, shape: Any, dtype: Any, seed: Any) -> torch.Tensor:
    dtype, device = to_torch_dtype(dtype), torch.device(get_device())
    drawn: torch.Tensor = _ops().drawn(draw_seed(seed), kind, float(low), float(high), list(shape), dtype, device)
    return drawn
