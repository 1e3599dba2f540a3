"""Random numbers. Parts draw apart; what is whole on several ranks is drawn alike there. In an exact space all ranks
draw the whole, as one device does, and keep their parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.binding import DIRECT, functions
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import (
    ShardedTensor,
    as_whole,
    distribute,
    moved,
    replaced,
    space_of,
    wrap,
)
from unidist.propagation.layouts import WHOLE, Cut, States

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
_MIX = 0x9E3779B97F4A7C15


@contextmanager
def drawn(space: Space, states: States, device: torch.device, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inside, ranks that hold the same part draw the same numbers, and others draw others: all from a number that the
    first rank draws, by the generator that is given or torch's own. Gives the arguments without the generator.

    Nothing may be sent inside: virtual ranks share torch's generator."""
    if space.exact:
        yield kwargs
        return
    generator = kwargs.get("generator")
    where = generator.device if generator is not None else None
    seed = space.agreed(int(torch.randint(1 << 62, (), generator=generator, device=where)))
    for axis, state in enumerate(states):
        if isinstance(state, Cut):
            seed = (seed * 31 + space.places[axis] + 1) * _MIX % (1 << 62)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield {name: value for name, value in kwargs.items() if name != "generator"}


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, spec = args[0], args[0].spec.joined
    if space_of((args[1:], kwargs)) is not None:
        return _whole(func, args, kwargs)
    if spec.space.exact:
        exact = _whole if func in VALUES else _exact
        return exact(func, args, kwargs)
    part = moved(x, spec.states) if func in VALUES else x.local.new_empty(spec.local)
    with drawn(spec.space, spec.states, x.device, kwargs) as rest:
        return wrap(func(part, *args[1:], **rest), spec)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    spec = x.spec.joined
    rest = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    part = moved(x, spec.states)
    if spec.space.exact:
        kept = func(part.new_ones(spec.shape), *args[1:3], **rest) if func in PRODUCTS else None
        out = _whole(func, (x, *args[1:3]), rest) if kept is None else wrap(part * distribute(kept, spec).local, spec)
        return x.copy_(out) if kwargs.get("inplace") or True in args[3:] else out
    with drawn(spec.space, spec.states, x.device, {}):
        out = wrap(func(part, *args[1:3], **rest), spec)
    return x.copy_(out) if kwargs.get("inplace") or True in args[3:] else out


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    space = space_of((args, kwargs))
    assert space is not None
    given, named = replaced((args, kwargs), ShardedTensor, ShardedTensor.whole)
    with drawn(space, (WHOLE,) * len(space.sizes), torch.device("cpu"), named) as rest:
        out = func(*given, **rest)
    return replaced(out, Tensor, lambda x: as_whole(space, x))


def _exact(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is drawn for a whole in the layout of the first argument, whose values are not read."""
    x = args[0]
    return distribute(func(x.local.new_empty(x.shape), *args[1:], **kwargs), x.spec.joined)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, spec = args[0], args[0].spec
    if spec.partial or space_of((args[1:], kwargs)) is not None:
        fresh = torch.empty_like(x)
        return x.copy_(_whole(func, (fresh, *args[1:]), kwargs))
    if spec.space.exact:
        return x.copy_(_exact(func, args, kwargs))
    with drawn(spec.space, spec.states, x.device, kwargs) as rest:
        func(x.local, *args[1:], **rest)
    return x


VALUES = frozenset(functions("bernoulli poisson"))
# Of which each element is a product of the input's and one that is drawn.
PRODUCTS = frozenset(functions("dropout", (torch, F)))
for _names, _run in ((LIKE, _like), (DROPOUTS, _dropout), (OF_WHOLES, _whole), (IN_PLACE, _in_place)):
    for _function in functions(_names, (torch, Tensor, F, torch.special)):
        DIRECT.setdefault(_function, _run)
