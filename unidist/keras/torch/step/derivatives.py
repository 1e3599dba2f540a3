"""Sums torch.autograd.grad of variables over the data shards, in a step of the user's own.

In a loop of the user's own it averages them, as gradients of loss.backward() are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unidist import events
from unidist.algebra import Sharding
from unidist.backends.torch.sharded import ShardedTensor
from unidist.errors import CapabilityError
from unidist.keras.needs import own_code
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.stateful_layers import refuse_in_a_loop
from unidist.keras.torch import carrying, context, features
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params import seen, sharded_norms
from unidist.keras.torch.params.storage import Storage

_OPTIONS = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched")


def hooks() -> Iterator[Hook]:
    why = "gradients of all data shards' rows"
    yield Hook(torch.autograd, "backward", _rooted, why)
    yield Hook(torch.autograd, "grad", _summed, why, imported=True, needed=own_code)


@calling
def _rooted(original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """A loss that all ranks have, without a row in it, begins on each with its share."""
    frame = context.frame()
    if frame is None or frame.is_making_gradients:
        original(tensors, grad_tensors, *args, **kwargs)
        return
    if frame.carried is not None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        tensors = [carrying.rooted(frame, root) for root in roots]
    with frame.making_gradients():
        original(tensors, grad_tensors, *args, **kwargs)


@calling
def _summed(original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    frame = context.frame()
    # torch's own transforms have whole tensors, and differentiate them by this function.
    is_within = torch._C._are_functorch_transforms_active()
    is_making = frame is not None and frame.is_making_gradients
    if is_making or is_within:
        return original(outputs, inputs, *args, **kwargs)
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    of = _storages(frame, given)
    if not any(of) and (frame is None or frame.carried is None):
        return original(outputs, inputs, *args, **kwargs)
    options = {**dict(zip(_OPTIONS, args, strict=False)), **kwargs}
    if frame is None:
        if any(s.summed_axes for s in of if s is not None):
            _check_options(options)
        for path in (s.path for s in of if s is not None and s.is_overwritten):
            refuse_in_a_loop(path)
        leaves = [x.kept.parameter() if isinstance(x, seen.Value) else x for x in given]
        found = original(outputs, leaves, **options)
        return tuple(g if s is None else _averaged(g, s, x) for g, s, x in zip(found, of, given, strict=True))
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if frame.carried is not None:
        roots = [carrying.rooted(frame, root) for root in roots]
    leaves = [x if storage is None else storage.leaf(frame.rank) for x, storage in zip(given, of, strict=True)]
    with frame.making_gradients():
        found = original(roots, leaves, **options)
    return tuple(g if s is None else _reduced(frame, g, s) for g, s in zip(found, of, strict=True))


def _storages(frame: Frame | None, tensors: list[Any]) -> list[Storage | None]:
    """Finds the storages that tensors are the values of.

    In a step of the user's own, or where no rank of a trainer is at work and each process has a gradient of its own.
    """
    is_step = frame is not None and frame.own_step
    if (frame is not None and not is_step) or not any(isinstance(x, torch.nn.Parameter | seen.Value) for x in tensors):
        return [None] * len(tensors)
    joined = (
        one
        for one in list(sharded_norms.placed)
        if is_step or (not one.world.is_virtual and (one.summed_axes or one.drifting_axes))
    )
    leaves_of = {id(one.leaves.get(one.rank_at_work(frame))): one for one in joined}
    return [x.kept if isinstance(x, seen.Value) else leaves_of.get(id(x)) for x in tensors]


def _averaged(grad: torch.Tensor | None, storage: Storage, of: torch.Tensor) -> torch.Tensor | None:
    """In a loop of the user's own; `of`: what was given as the variable's value."""
    if grad is None or grad.requires_grad:
        return grad
    shards, rank = storage.world.mesh.axis_size(storage.summed_axes), storage.world.ranks[0]
    if not isinstance(of, seen.Value):
        return _sum(grad, storage, rank, storage.sharding) / shards
    if not storage.is_kept:
        return seen.carried(storage, grad)  # of what this process stores, and averaged where it was gathered
    return seen.carried(storage, _sum(grad, storage, rank, storage.shardings.state) / shards)


def _sum(grad: torch.Tensor, storage: Storage, rank: int, target: Sharding) -> torch.Tensor:
    """Returns the sum of the data shards' gradients.

    Where ranks may have other last bits it is as the first of them has it.
    """
    held, axes, drifting = storage.sharding, storage.summed_axes, storage.drifting_axes
    if not axes and not drifting:
        return grad
    partial = held.with_layout(held.layout.with_axis((*axes, *drifting), "P"))
    own = grad.detach() if storage.world.is_first(rank, drifting) else torch.zeros_like(grad)
    with events.for_purpose("gradient"), torch.no_grad():
        return storage.world.backend.redistribute(own, partial, target)


def _check_options(options: dict[str, Any]) -> None:
    if options.get("create_graph"):
        raise CapabilityError(
            "torch.autograd.grad(..., create_graph=True) of a variable was called in a loop of your own: the "
            "gradient is that of this rank's rows until the ranks sum it, and torch cannot differentiate what it "
            "becomes. Compute the penalty in train_step"
        )


def _carried(frame: Frame, grad: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Makes a gradient with a graph the whole, where model axes cut its variable."""
    cuts = [(dim, axes) for dim, axes in enumerate(storage.layout.dims) if axes]
    if len(cuts) > 1:
        raise CapabilityError(
            f"torch.autograd.grad(..., create_graph=True) of {storage.path!r}, of which several dims are cut: its "
            "gradient cannot be differentiated again. Leave the variable whole in the layout map"
        )
    ((dim, axes),) = cuts
    return features.given(frame, grad, dim, storage.sharding.shape[dim], axes)


def _reduced(frame: Frame, grad: Any, storage: Storage) -> torch.Tensor | None:
    """Returns a rank's summand as it is summed.

    One that has a graph stays a carrier, which can be differentiated.
    """
    if grad is None or grad.requires_grad:
        return grad if grad is None or not storage.is_sharded else _carried(frame, grad, storage)
    own = grad.local if type(grad) is ShardedTensor else grad
    return seen.carried(storage, _sum(own, storage, frame.rank, storage.shardings.state))
