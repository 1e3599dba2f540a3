"""torch.autograd.grad of variables: its gradients are summed over the data shards in a step of the user's own, and
averaged over them in a loop of the user's own, as those of loss.backward() are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist import events
from unidist.algebra import Sharding
from unidist.errors import CapabilityError
from unidist.keras.interception import Hook
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame
from unidist.keras.torch.rows import own_rows
from unidist.keras.torch.rows.rowparts import RowPart
from unidist.keras.torch.steps import losses
from unidist.keras.torch.values import norms, seen
from unidist.keras.torch.values.storage import Storage

_OPTIONS = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched")


def hooks() -> Iterator[Hook]:
    yield Hook(torch.autograd, "grad", _summed, "gradients of all data shards' rows", imported=True)


def _summed(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        # torch's own transforms have whole tensors (parts.py), and differentiate them by this function.
        is_within = torch._C._are_functorch_transforms_active()
        is_making = frame is not None and (frame.trial is not None or frame.is_making_gradients)
        if is_making or is_within:
            return original(outputs, inputs, *args, **kwargs)
        given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        of = _storages_in_a_loop(given) if frame is None else _storages(frame, given)
        sees_rows = frame is not None and (frame.sees_rows or frame.region is not None)
        if not any(of) and not sees_rows:
            return original(outputs, inputs, *args, **kwargs)
        options = {**dict(zip(_OPTIONS, args, strict=False)), **kwargs}
        if frame is None:
            if any(s.summed_axes for s in of if s is not None):
                _check_options(options, "in a loop of your own")
            leaves = [x.kept.parameter() if isinstance(x, seen.Value) else x for x in given]
            found = original(outputs, leaves, **options)
            return tuple(g if s is None else _averaged(g, s, x) for g, s, x in zip(found, of, given, strict=True))
        roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if any(of):
            _check(frame, roots, options)
        leaves = [x if storage is None else storage.leaf(frame.rank) for x, storage in zip(given, of, strict=True)]
        if not sees_rows:
            with frame.making_gradients():
                found = original(roots, leaves, **options)
            return tuple(g if s is None else _reduced(frame, g, s) for g, s in zip(found, of, strict=True))
        found = own_rows.derived(frame, original, roots, leaves, options)
        return tuple(_joined(frame, g, s) for g, s in zip(found, of, strict=True))

    return grad


def _storages(frame: Frame, tensors: list[Any]) -> list[Storage | None]:
    """Of what tensors are the values, in a step of the user's own."""
    if not frame.own_step:
        return [None] * len(tensors)
    leaves_of = {id(one.leaves[frame.rank]): one for one in norms.placed if frame.rank in one.leaves}
    return [x.kept if isinstance(x, seen.Value) else leaves_of.get(id(x)) for x in tensors]


def _storages_in_a_loop(tensors: list[Any]) -> list[Storage | None]:
    """Of what tensors are the values, where no rank of a trainer is at work: of which each process has a gradient of
    its own."""
    if not any(isinstance(x, torch.nn.Parameter | seen.Value) for x in tensors):
        return [None] * len(tensors)
    several = [one for one in norms.placed if not one.world.is_virtual and (one.summed_axes or one.drifting_axes)]
    leaves_of = {id(one.leaf(one.world.ranks[0])): one for one in several}
    return [x.kept if isinstance(x, seen.Value) else leaves_of.get(id(x)) for x in tensors]


def _averaged(grad: torch.Tensor | None, storage: Storage, of: torch.Tensor) -> torch.Tensor | None:
    """In a loop of the user's own; `of`: what was given as the variable's value."""
    if grad is None or grad.requires_grad:
        return grad
    shards, rank = storage.world.mesh.axis_size(storage.summed_axes), storage.world.ranks[0]
    if not isinstance(of, seen.Value):
        return _sum(grad, storage, rank, storage.sharding) / shards
    if not storage.is_kept:
        return seen.Gradient.of(storage, grad)  # of what this process stores, and averaged where it was gathered
    return seen.Gradient.of(storage, _sum(grad, storage, rank, storage.shardings.state) / shards)


def _sum(grad: torch.Tensor, storage: Storage, rank: int, target: Sharding) -> torch.Tensor:
    """The sum of the data shards' gradients, as the first of the ranks has it that may have other last bits."""
    held, axes, drifting = storage.sharding, storage.summed_axes, storage.drifting_axes
    if not axes and not drifting:
        return grad
    partial = held.with_layout(held.layout.with_axis((*axes, *drifting), "P"))
    own = grad.detach() if storage.world.is_first(rank, drifting) else torch.zeros_like(grad)
    with events.for_purpose("gradient"), torch.no_grad():
        return storage.world.backend.redistribute(own, partial, target)


def _joined(frame: Frame, grad: Any, storage: Storage | None) -> Any:
    """Where the rows of all shards are in view."""
    if storage is not None:
        return _reduced(frame, grad, storage)
    return grad if isinstance(grad, RowPart) else own_rows.joined(frame, grad)


def _check(frame: Frame, roots: list[Any], options: dict[str, Any]) -> None:
    """Raises CapabilityError where the gradients of the ranks' rows do not add up to that of all rows."""
    if frame.world.data_axes:
        _check_options(options, "in train_step")
    losses.check_roots(frame, roots)


def _check_options(options: dict[str, Any], where: str) -> None:
    if options.get("create_graph"):
        raise CapabilityError(
            f"torch.autograd.grad(..., create_graph=True) of a variable was called {where}: the gradient is that of "
            "this rank's rows until the ranks sum it, and torch cannot differentiate what it becomes. Compute the "
            "penalty in a layer, or of the inputs' gradient"
        )


def _reduced(frame: Frame, grad: torch.Tensor | None, storage: Storage) -> torch.Tensor | None:
    if grad is None:
        return None
    state = storage.shardings.state
    # With a graph of its own it stays this rank's: no collective of ours is part of one.
    part = grad if grad.requires_grad else _sum(grad, storage, frame.rank, state)
    return seen.Gradient.of(storage, part) if state.layout.dims else part
