"""The few names of torch that are replaced while carriers are in use, and that can be put back.

torch calls `__torch_function__` for all but these: autograd.Function.apply computes past it, and gives a result without
a gradient, in silence; the transforms of torch.func refuse what is not torch's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

from unidist.algebra import Mesh
from unidist.backends.local import LocalViewBackend
from unidist.backends.torch.sharded.autograd import applied, on_wholes
from unidist.backends.torch.sharded.nested import space_of
from unidist.backends.torch.sharded.space import Space
from unidist.errors import CapabilityError

MISSING = object()


@dataclass(frozen=True, slots=True)
class Entrance:
    """One attribute of torch.

    Attributes:
        owner: where it is.
        name: of the attribute.
        make: the replacement, from what stands there.
        why: what goes wrong without it.
        needed: whether carriers give wrong numbers without it; else torch refuses them by itself.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    why: str
    needed: bool = False


def of_apply(found: Any) -> Any:
    """`found` is a classmethod, or a builtin one without `__func__`: both are descriptors."""

    @classmethod  # type: ignore[misc]
    @functools.wraps(torch.autograd.Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        native = found.__get__(None, cls)
        if space_of((args, kwargs)) is None:
            return native(*args, **kwargs)
        if cls is CHECKPOINT:
            return _checkpointed(*args)
        return applied(native, args, kwargs)

    return apply


CHECKPOINT = getattr(torch.utils.checkpoint, "CheckpointFunction", None)


def _checkpointed(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Replaces the reentrant form of checkpoint by the other one, which sees all.

    The reentrant form runs a backward of its own within backward, on what it was given.
    """
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


def of_transform(found: Any) -> Any:
    served = on_wholes(found)

    @functools.wraps(found)
    def transform(*args: Any, **kwargs: Any) -> Any:
        return served(*args, **kwargs)

    return transform


def table() -> tuple[Entrance, ...]:
    transforms = ("grad", "grad_and_value", "vmap", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")
    return (
        Entrance(torch.autograd.Function, "apply", of_apply, "its result would have no gradient", needed=True),
        *(Entrance(torch.func, name, of_transform, "it refuses carriers") for name in transforms),
        Entrance(torch, "vmap", of_transform, "it refuses carriers"),
    )


_standing: list[tuple[Entrance, Any, Any]] = []


def put_on() -> None:
    """Replaces them all. Again changes nothing.

    Raises:
        CapabilityError: this torch has not what carriers need.
    """
    if _standing:
        return
    rows = table()
    for row in rows:
        if row.needed and inspect.getattr_static(row.owner, row.name, MISSING) is MISSING:
            raise CapabilityError(
                f"torch {torch.__version__} has no {row.owner.__name__}.{row.name}, which sharded tensors need "
                f"({row.why}): use a version of torch that unidist names"
            )
    for row in rows:
        found = inspect.getattr_static(row.owner, row.name, MISSING)
        if found is not MISSING:
            before = vars(row.owner).get(row.name, MISSING)  # an inherited one is not its own
            setattr(row.owner, row.name, row.make(found))
            _standing.append((row, before, vars(row.owner)[row.name]))


def space(backend: LocalViewBackend[torch.Tensor], mesh: Mesh) -> Space:
    """A mesh as the calling rank of a backend sees it. From then on torch's entrances are served."""
    put_on()
    return Space.of(backend, mesh)


def take_off() -> None:
    """Puts back what was there, but where somebody has replaced it since."""
    for row, before, ours in reversed(_standing):
        if vars(row.owner).get(row.name) is not ours:
            continue
        if before is MISSING:
            delattr(row.owner, row.name)
        else:
            setattr(row.owner, row.name, before)
    _standing.clear()
