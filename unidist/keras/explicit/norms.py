"""torch's own clipping of gradients, in a step of the user's own: its norms are those of whole variables.

It is given the parameters that a process holds. Where these are cut, it would see a part of the gradients, or none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.keras.explicit import context
from unidist.keras.interception import Hook

if TYPE_CHECKING:
    from unidist.algebra.layout import ReduceOp
    from unidist.keras.explicit.storage import Storage

_placed: weakref.WeakSet[Storage] = weakref.WeakSet()
_INF = float("inf")


def hooks() -> Iterator[Hook]:
    why = "torch clips by the norms of whole variables"
    yield Hook(clip_grad, "_get_total_norm", _of_wholes, why, imported=True)
    yield Hook(torch.nn.utils, "get_total_norm", _of_wholes, why, imported=True)
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        yield Hook(clip_grad, name, _of_parts, why, imported=True)
    yield Hook(torch.nn.utils, "clip_grads_with_norm_", _of_parts, why, imported=True)


def watch(storage: Storage) -> None:
    """To be called for each variable that is placed."""
    _placed.add(storage)


def _rank(storage: Storage) -> int:
    frame = context.frame()
    return storage.world.ranks[0] if frame is None else frame.rank


def _of_parts(original: Any) -> Callable[..., Any]:
    """torch sees the parts that have the gradients; in the simulator those of the rank at work."""

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        own: dict[int, torch.Tensor] = {}
        for storage in list(_placed):
            if (part := storage.states.get(_rank(storage))) is not None:
                held = (*storage.shards.values(), *storage.leaves.values())
                own |= dict.fromkeys(map(id, held), part)
        return original([own.get(id(one), one) for one in given], *args, **kwargs)

    return clip


def _of_wholes(original: Any) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = _owners()
        cut = [(one, owners[id(one)]) for one in given if id(one) in owners]
        if not cut:
            found: torch.Tensor = original(given, norm_type, error_if_nonfinite, foreach)
            return found
        with torch.no_grad():
            rest = [torch.linalg.vector_norm(one, norm_type) for one in given if id(one) not in owners]
            # Their norm is that of all: as if they were one vector.
            whole = [*rest, *_norms(cut, float(norm_type))]
        found = original([torch.stack([norm.to(given[0].device) for norm in whole])], norm_type, error_if_nonfinite)
        return found

    return total_norm


def _owners() -> dict[int, Storage]:
    """id of a part's gradient -> whose it is."""
    parts = ((one, one.states.get(_rank(one))) for one in list(_placed) if one.shardings.state.layout.dims)
    return {id(part.grad): storage for storage, part in parts if part is not None and part.grad is not None}


def _norms(cut: Sequence[tuple[torch.Tensor, Storage]], p: float) -> Iterator[torch.Tensor]:
    """The norm of each whole gradient; this rank has a part of it."""
    op: ReduceOp = "max" if p == _INF else "min" if p == -_INF else "sum"
    came = of_wholes([_summand(grad, p) for grad, _ in cut], [storage for _, storage in cut], op)
    yield from (came if op != "sum" or p == 0 else (one ** (1 / p) for one in came))


def of_wholes(numbers: Sequence[torch.Tensor], storages: Sequence[Storage], op: ReduceOp) -> list[torch.Tensor]:
    """A number of each gradient; this rank has that of its part. A collective for each way in which some are
    cut.

    Args:
        numbers: of no dims and one dtype.
        storages: of their variables.
        op: what makes that of the whole of those of the parts.
    """
    found = list(numbers)
    groups: dict[tuple[str, ...], list[int]] = {}
    for k, storage in enumerate(storages):
        if axes := storage.shardings.state.layout.sharded_axes:
            groups.setdefault(tuple(sorted(axes)), []).append(k)
    for axes, members in groups.items():
        world = storages[members[0]].world
        stacked = torch.stack([found[k] for k in members])
        partial = Sharding(world.mesh, Layout(partial=dict.fromkeys(axes, op)), tuple(stacked.shape))
        with events.for_purpose("gradient norm"):
            whole = world.backend.redistribute(stacked, partial, partial.with_layout(Layout()))
        for k, value in zip(members, whole.unbind(), strict=True):
            found[k] = value
    return found


def _summand(grad: torch.Tensor, p: float) -> torch.Tensor:
    """What is summed over the parts of a gradient, or of what the largest or the smallest counts."""
    if not grad.numel():
        return grad.new_tensor(_INF if p == -_INF else 0.0)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, p)
    return norm if abs(p) == _INF or p == 0 else norm.pow(p)
