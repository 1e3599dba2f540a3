"""The simulator's program outside of steps: a whole parameter for each variable, for ranks to follow.

On one device a program may read a variable, differentiate by it, keep its gradient, and write into its tensor. So does
the main thread here, whatever its ranks store. Where ranks run, they get what it has written of a variable as they
reach it, and behind it has what they have made of that. So a step costs what it reaches, however many models live.
Nothing is held for variables that the program never looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unidist.algebra import Sharding
from unidist.keras.torch import context, transforms

if TYPE_CHECKING:
    from unidist.keras.torch.params.storage import Storage

# What the ranks have reached; None where none run.
_reached: set[Storage] | None = None


@dataclass
class Outside:
    """Holds what the program has of a variable.

    Attributes:
        parameter: whole. Without memory, until somebody looks.
        is_looked_at: somebody has.
        gradient: what the ranks have left. version: of it, then.
    """

    parameter: torch.nn.Parameter
    is_looked_at: bool = False
    gradient: torch.Tensor | None = None
    version: int = 0

    @staticmethod
    def like(shard: torch.nn.Parameter, shape: tuple[int, ...]) -> Outside:
        empty = torch.empty(shape, dtype=shard.dtype, device=shard.device)
        empty.untyped_storage().resize_(0)
        return Outside(torch.nn.Parameter(empty, requires_grad=shard.requires_grad))


def look(storage: Storage) -> torch.nn.Parameter:
    """The whole parameter of a variable, as the ranks have left it or the program has made it."""
    outside = storage.outside
    if not outside.is_looked_at:
        outside.parameter.untyped_storage().resize_(outside.parameter.nbytes)
        outside.is_looked_at = True
        take(storage)
    return outside.parameter


def can_look(storage: Storage) -> bool:
    """Returns whether no rank runs, and the variable has one value: no sum of what the ranks have."""
    return _reached is None and not storage.shardings.stored.layout.partial


def is_ahead(storage: Storage) -> bool:
    """Returns whether the program's parameter counts, and not the ranks': looked at, and no rank runs."""
    return _reached is None and storage.of_program is not None and storage.of_program.is_looked_at


@contextlib.contextmanager
def ranks_running() -> Iterator[None]:
    """Inside the ranks run."""
    global _reached
    reached: set[Storage] = set()
    _reached = reached
    try:
        yield
    finally:
        _reached = None
        for storage in reached:
            take(storage)


def reach(storage: Storage) -> None:
    """A rank is about to use a variable: all ranks get what the program has made of it before."""
    if _reached is None or storage.of_program is None or not storage.of_program.is_looked_at or storage in _reached:
        return
    _reached.add(storage)
    with context.left(), transforms.left():
        give(storage)


def settle(storage: Storage) -> None:
    """The ranks get what the program has made of a variable, whether they run or not."""
    if is_ahead(storage):
        give(storage)
    else:
        reach(storage)


def whole(storage: Storage) -> torch.Tensor:
    """The whole value where no rank is at work."""
    if is_ahead(storage):
        return storage.outside.parameter
    reach(storage)
    return assembled(storage.shards, storage.shardings.stored)


def follow_torch(storage: Storage) -> bool:
    """Takes over from the program's parameter whether a variable is trained: torch's own way to freeze it."""
    rank, world = storage.world.ranks[0], storage.world
    # Not by parameter(), which would wait for what is under way.
    own = storage.parameters()[-1] if world.runs_several else storage.shards[rank]
    if own.requires_grad != storage.leaf(rank).requires_grad:
        storage.set_trainable(own.requires_grad)
    return own.requires_grad


def give(storage: Storage) -> None:
    """The ranks get what the program has written: into the tensor, by whatever way, and as its gradient."""
    outside = storage.outside
    value, gradient = outside.parameter.detach(), outside.parameter.grad
    stored, state = storage.shardings.stored, storage.shardings.state
    pairs = ((shard.detach(), value[stored.slices(rank)]) for rank, shard in storage.shards.items())
    if not all(torch.equal(own, given.to(own.device)) for own, given in pairs):
        storage.assign(value)
    if gradient is outside.gradient and (gradient is None or gradient._version == outside.version):
        return
    for rank, own in storage.states.items():
        storage.forget_gradients(rank)
        own.grad = None if gradient is None else gradient.detach()[state.slices(rank)].clone()


def take(storage: Storage) -> None:
    """The program gets what the ranks have."""
    outside, state = storage.outside, storage.shardings.state
    with torch.no_grad():
        outside.parameter.copy_(assembled(storage.shards, storage.shardings.stored))
        gradients = {rank: own.grad for rank, own in storage.states.items() if own.grad is not None}
        whole = assembled(gradients, state) if len(gradients) == len(storage.states) else None
    outside.parameter.grad = outside.gradient = whole
    outside.version = 0 if whole is None else whole._version


def assembled(tensors: Mapping[int, torch.Tensor], sharding: Sharding) -> torch.Tensor:
    """Returns the whole of what all ranks have, without a step of theirs.

    Where all have it whole it is the first rank's.
    """
    first, layout, mesh = next(iter(tensors.values())), sharding.layout, sharding.mesh
    if not layout.dims and not layout.partial:
        return first
    out = torch.zeros(sharding.shape, dtype=first.dtype, device=first.device)
    counted = [axis for axis, op in layout.partial if op == "sum"]
    for rank, tensor in tensors.items():
        here = mesh.coordinate(rank)
        if any(here[a] for a in mesh.axis_names if layout.state(a) != "S" and a not in counted):
            continue
        part = out[sharding.slices(rank)]
        part.copy_(part + tensor.detach() if counted else tensor.detach())
    return out
