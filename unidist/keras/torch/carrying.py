"""A step on carriers: its code sees a batch as the whole, and each data shard holds its own rows.

What may look at any rows (losses, metrics, steps, layers of the user's own) computes with ShardedTensors: each
operation has a rule, or gathers. Layers of Keras that treat each row alone take their rows off them, compute natively,
and put the layout on what they give.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist import events
from unidist.backends.torch.sharded import ShardedTensor, Space, wrap
from unidist.backends.torch.sharded.nested import replaced
from unidist.backends.torch.sharded.tensor import distribute, moved
from unidist.keras.patching.compat import get_device, get_keras_mask, set_keras_mask
from unidist.keras.torch import features
from unidist.keras.torch.context import Frame, Rows
from unidist.keras.torch.structures import mapped, of_batch
from unidist.propagation.layouts import PARTIAL, Cut, chunked

# Where a batch is not cut.
_NONE = Rows(0, (0,))


def space_at(here: Frame) -> Space:
    """The data shards, as the rank at work sees them."""
    world = here.world
    found: Space | None = world.spaces.get((here.rank, world.data_axes))
    return features.made(here, world.data_axes) if found is None else found


def space_amid(here: Frame) -> Space | None:
    """The data shards where what is computed carries the rows of all; None elsewhere."""
    return space_at(here) if here.carried is not None and here.world.cuts_rows else None


@contextlib.contextmanager
def step(here: Frame, batch: Any, apart: bool = False) -> Iterator[Any]:
    """Carries a step's batch; one that is not cut stays as it is: the whole, on each rank.

    `apart`: of such a batch each tensor is cut by its own rows.
    """
    rows = here.rows
    with here.carrying_rows(rows or _NONE), events.for_purpose("losses"):
        is_cut = rows is not None or apart
        yield of_batch(functools.partial(_carried, here, rows), batch) if is_cut else batch


def _carried(here: Frame, rows: Rows | None, x: Any) -> Any:
    if not len(getattr(x, "shape", ())) or getattr(x.dtype, "kind", "f") in "OUST":
        return x
    given = torch.as_tensor(x, device=get_device())
    if rows is not None:
        return wrapped(here, rows, given)
    space = space_at(here)
    return distribute(given, space.spec((chunked(0, len(given), space.sizes[0]),), given.shape))


def wrapped(here: Frame, rows: Rows, local: torch.Tensor) -> ShardedTensor:
    """This rank's rows, and those of their mask, as the whole."""
    spec = space_at(here).spec((Cut(0, rows.sizes),), torch.Size((rows.total, *local.shape[1:])))
    out = wrap(local, spec)
    mask = get_keras_mask(local)
    if mask is not None:
        set_keras_mask(out, wrapped(here, rows, mask) if mask.shape[:1] == local.shape[:1] else mask)
    return out


def summand(here: Frame, x: torch.Tensor) -> ShardedTensor:
    """Carries what ranks add up to."""
    return wrap(x, space_at(here).spec((PARTIAL,), x.shape))


# what is plain --------------------------------------------------------------------------------------------------------


def whole(x: Any) -> Any:
    """Returns what a carrier stands for; anything else as it is."""
    return x.whole() if type(x) is ShardedTensor else x


def taken_off(given: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The parts of the carriers in a structure, and what puts the layouts on such parts again."""
    layouts: list[Any] = []

    def put_on(parts: Any) -> Any:
        left = iter(layouts)
        return mapped(lambda x: _on(x, next(left)), parts)

    return mapped(lambda x: _off(x, layouts), given), put_on


# No functions within a function: one that calls itself holds what it has seen until Python looks for cycles.
def _off(x: Any, layouts: list[Any]) -> Any:
    if type(x) is not ShardedTensor:
        layouts.append(None)
        return x
    part = _off(x.local, layouts)
    layouts.append((layouts.pop(), x.spec, get_keras_mask(x)))
    return part


def _on(x: Any, layout: Any) -> Any:
    if layout is None:
        return x
    inner, spec, mask = layout
    out = wrap(_on(x, inner), spec)
    if mask is not None:
        set_keras_mask(out, mask)
    return out


def plain(value: Any) -> Any:
    """A structure without carriers. Numbers that are sums come together in one collective."""
    found: list[Any] = []
    replaced(value, ShardedTensor, found.append)
    sums = [x for x in found if features.carries_rows(x) and x.spec.partial and not x.ndim and x.is_floating_point()]
    known: dict[int, torch.Tensor] = {}
    with torch.no_grad(), events.for_purpose("logs"):
        if len(sums) > 1:
            joined: Any = torch.stack([x.detach().double() for x in sums])
            known = {id(x): number.to(x.dtype) for x, number in zip(sums, joined.whole().unbind(), strict=True)}
        return replaced(value, ShardedTensor, lambda x: known[id(x)] if id(x) in known else x.detach().whole())


def agreed(here: Frame, logs: Any) -> Any:
    """The logs of a step, the same bits on ranks that have computed alike: callbacks decide by them."""
    if not here.world.drifting or not isinstance(logs, dict) or not logs:
        return logs
    own = {name: x for name, x in logs.items() if isinstance(x, torch.Tensor) and not x.ndim and x.is_floating_point()}
    with torch.no_grad(), events.for_purpose("logs"):
        return {**logs, **dict(zip(own, here.world.agreed(here, list(own.values()), ()), strict=True))}


def settle_losses(model: Any) -> None:
    """Makes what was added to the losses of a model's layers numbers, which are read behind the step."""
    for layer in model._flatten_layers():
        if layer._losses and any(type(loss) is ShardedTensor for loss in layer._losses):
            found = plain(list(layer._losses))
            layer._losses.clear()
            layer._losses.extend(found)


def part_of(variable: Any, here: Frame, value: Any) -> Any:
    """Returns what the rank at work writes of a value into a variable: a summand, where ranks hold such."""
    is_sum = bool(variable._storage.shardings.stored.layout.partial)
    value = features.whole(value)
    if type(value) is ShardedTensor:
        return moved(value.detach(), (PARTIAL,)) if is_sum else value.detach().whole()
    return 0 * value if is_sum and variable._storage.is_others(here) else value


def rooted(here: Frame, root: Any) -> Any:
    """Returns what a gradient begins with.

    Of a loss without rows, which all ranks have, each begins with its share.
    """
    if type(root) is ShardedTensor or not here.world.cuts_rows:
        return root
    return wrap(root, space_at(here).whole(root.shape))
