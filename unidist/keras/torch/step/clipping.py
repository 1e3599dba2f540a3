"""torch's own clipping of gradients, in a step of the user's own: takes norms of whole variables.

It is given the parameters that a process holds. Where these are cut, it would see a part of the gradients, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from unidist.keras.needs import own_code
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import context
from unidist.keras.torch.params import seen, sharded_norms

if TYPE_CHECKING:
    from unidist.keras.torch.params.storage import Storage


def hooks() -> Iterator[Hook]:
    why = "torch clips by the norms of whole variables"
    yield Hook(clip_grad, "_get_total_norm", _of_wholes, why, imported=True, needed=own_code)
    yield Hook(torch.nn.utils, "get_total_norm", _of_wholes, why, imported=True, needed=own_code)
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        yield Hook(clip_grad, name, _of_parts, why, imported=True, needed=own_code)
    yield Hook(torch.nn.utils, "clip_grads_with_norm_", _of_parts, why, imported=True, needed=own_code)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


@calling
def _of_parts(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """torch sees the parts that have the gradients; in the simulator those of the rank at work."""
    given = [one.held() if isinstance(one, seen.Value) else one for one in _listed(parameters)]
    own: dict[int, torch.Tensor] = {}
    frame = context.frame()
    for storage in list(sharded_norms.placed):
        part = storage.states.get(storage.rank_at_work(frame))
        if part is not None and (frame is not None or not storage.world.runs_several):
            own |= dict.fromkeys(map(id, storage.parameters()), part)
    return original([own.get(id(one), one) for one in given], *args, **kwargs)


@calling
def _of_wholes(
    original: Any, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    owners = _owners()
    given = [one.local if id(getattr(one, "local", None)) in owners else one for one in _listed(tensors)]
    cut = [(one, owners[id(one)]) for one in given if id(one) in owners]
    if not cut:
        found: torch.Tensor = original(given, norm_type, error_if_nonfinite, foreach)
        return found
    with torch.no_grad():
        rest = [torch.linalg.vector_norm(one, norm_type) for one in given if id(one) not in owners]
        # Their norm is that of all: as if they were one vector.
        whole = [*rest, *sharded_norms.of_parts(cut, float(norm_type))]
    found = original([torch.stack([norm.to(given[0].device) for norm in whole])], norm_type, error_if_nonfinite)
    return found


def _owners() -> dict[int, Storage]:
    frame = context.frame()
    parts = (
        (one, one.states.get(one.rank_at_work(frame)))
        for one in list(sharded_norms.placed)
        if one.shardings.state.layout.dims
    )
    return {id(part.grad): storage for storage, part in parts if part is not None and part.grad is not None}
