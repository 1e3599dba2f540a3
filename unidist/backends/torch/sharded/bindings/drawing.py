"""Random numbers. All ranks draw the whole, as one device does, and keep their parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import DIRECT, functions
from unidist.backends.torch.sharded.nested import replaced, space_of
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import (
    ShardedTensor,
    as_whole,
    distribute,
    moved,
    wrap,
)

Tensor = torch.Tensor
LIKE = "rand_like randn_like randint_like bernoulli poisson"
DROPOUTS = "dropout alpha_dropout"
# Drawn for whole tensors, for they draw by channels, along dims, or places of what they pool.
OF_WHOLES = """
    multinomial normal dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    native_dropout binomial svd_lowrank pca_lowrank
"""
IN_PLACE = "normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_"


@contextmanager
def drawn(space: Space, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Lets all ranks draw the same numbers inside, and gives the arguments for that.

    Where their generators do not stand alike, all draw from a number that the first rank draws, by the generator that
    is given or torch's own. Nothing may be sent inside: virtual ranks share torch's generator.
    """
    if space.exact:
        yield kwargs
        return
    generator = kwargs.get("generator")
    where = generator.device if generator is not None else None
    seed = space.agreed(int(torch.randint(1 << 62, (), generator=generator, device=where)))
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        yield {name: value for name, value in kwargs.items() if name != "generator"}


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws for a whole, in the layout of the first argument, whose values are not read."""
    if func in VALUES or space_of((args[1:], kwargs)) is not None:
        return _whole(func, args, kwargs)
    x, spec = args[0], args[0].spec.joined
    with drawn(spec.space, kwargs) as rest:
        whole = func(x.local.new_empty(x.shape), *args[1:], **rest)
    return as_whole(spec.space, whole) if spec.whole else distribute(whole, spec)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    spec = x.spec.joined
    rest = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    if func in PRODUCTS and not spec.whole:
        part = moved(x, spec.states)
        with drawn(spec.space, rest):
            kept = func(part.new_ones(spec.shape), *args[1:3], **rest)
        out = wrap(part * distribute(kept, spec).local, spec)
    else:
        out = _whole(func, (x, *args[1:3]), rest)
    return x.copy_(out) if kwargs.get("inplace") or True in args[3:] else out


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    space = space_of((args, kwargs))
    assert space is not None
    given, named = replaced((args, kwargs), ShardedTensor, ShardedTensor.whole)
    with drawn(space, named) as rest:
        out = func(*given, **rest)
    return replaced(out, Tensor, lambda x: as_whole(space, x))


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if x.spec.partial or space_of((args[1:], kwargs)) is not None:
        return x.copy_(_whole(func, (torch.empty_like(x), *args[1:]), kwargs))
    return x.copy_(_like(func, args, kwargs))


VALUES = frozenset(functions("bernoulli poisson"))
# Of which each element is a product of the input's and one that is drawn.
PRODUCTS = frozenset(functions("dropout", (torch, F)))
for _names, _run in ((LIKE, _like), (DROPOUTS, _dropout), (OF_WHOLES, _whole), (IN_PLACE, _in_place)):
    for _function in functions(_names, (torch, Tensor, F, torch.special)):
        DIRECT.setdefault(_function, _run)
