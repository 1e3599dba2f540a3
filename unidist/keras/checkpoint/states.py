"""State: all variables of a model as its processes hold them, and how these processes act together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.protocol import Array, itemsize
from unidist.checkpoint.shares import Share
from unidist.checkpoint.tensors import FileSpec, Tensor, files_of
from unidist.errors import CheckpointError, LayoutError
from unidist.keras import driver as drivers
from unidist.keras.checkpoint.held import Held, OfFirst, Whole, rows_of
from unidist.keras.consistency.processes import ALONE, Processes
from unidist.keras.patching.compat import BaseOptimizer
from unidist.keras.records.layer_report import numbered


def by_first(holders: Processes, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what the first process's work gives, on all. A collective.

    Args:
        holders: the processes that act together.
        work: gives JSON.

    Raises:
        CheckpointError: on all, where it could not.
    """
    told: dict[str, Any] = {"error": "it ended"}
    try:
        if holders.is_first:
            told = {"found": work()}
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        told = json.loads(holders.bytes_of_first(json.dumps(told).encode(), "a checkpoint"))
    if "error" in told:
        raise CheckpointError(f"process 0, which acts for all, could not: {told['error']}")
    found: dict[str, Any] = told["found"]
    return found


def agree(holders: Processes, failure: OSError | None, what: str) -> None:
    """Returns where no process has failed. A collective.

    Raises:
        CheckpointError: on all, where one has.
    """
    found = holders.of_all(0 if failure is None else _number_of(failure), "a checkpoint")
    if failure is not None:
        raise failure
    failed = {ranks: number for ranks, number in zip(holders.ranks, found, strict=True) if number}
    if failed:
        told = "; ".join(f"rank {', '.join(map(str, ranks))}{_why(n)}" for ranks, n in failed.items())
        raise CheckpointError(f"could not {what}: {told}. The output of that process says more")


@dataclass(frozen=True)
class State:
    """A model's variables, each with its tensor in a checkpoint, in an order that all processes keep.

    Attributes:
        holders: the processes that hold the model.
    """

    model: Any
    variables: tuple[tuple[Tensor, Held], ...]
    holders: Processes

    @staticmethod
    def of(model: Any) -> State:
        """Returns the state of a built model, which is placed if it is distributed.

        Its optimizer is built if need be: a model that has taken no step has the same variables as one that goes on.

        Raises:
            LayoutError: the model is not built.
            CheckpointError: a variable's dtype has no place in a file.
        """
        if not model.built:
            raise LayoutError(f"model {model.name!r} is not built: call it or model.build(input_shape) first")
        # On JAX the variables are behind the steps of a fit.
        sync = getattr(model, "jax_state_sync", None)
        if sync is not None:
            sync()
        driver = drivers.current()
        for optimizer in optimizers(model):
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
        if driver is None:
            held: Callable[[Any], Held] = Whole
            return State(model, tuple(named(model, held)), ALONE)
        driver.ready(model)
        return State(model, tuple(named(model, driver.held)), driver.processes(model) or ALONE)

    @cached_property
    def files(self) -> tuple[FileSpec, ...]:
        return files_of([tensor for tensor, _ in self.variables])

    @property
    def has_optimizer(self) -> bool:
        return any(tensor.kind == "optimizer" for tensor, _ in self.variables)

    @cached_property
    def shares(self) -> tuple[tuple[Tensor, Held, Share], ...]:
        """The part of each variable that this process is to write.

        At first a collective, where values are sums over ranks.
        """
        return tuple(self._shares())

    def _shares(self) -> Iterator[tuple[Tensor, Held, Share]]:
        for number, (tensor, held) in enumerate(self.variables):
            held.fetch()
            sharding, owners = held.sharding, self.holders.ranks
            if sharding is None:
                count = 1 if isinstance(held, OfFirst) else self.holders.count
                one = Mesh({"process": count}, range(count))
                sharding = Sharding(one, Layout(), tensor.shape)
                owners = (*((k,) for k in range(count)), *((),) * (self.holders.count - count))
            elif self.holders.count == 1:
                owners = (sharding.mesh.devices,)
            yield tensor, held, Share(sharding, owners, self.holders.place, itemsize(held.dtype), number)

    def pieces(self) -> Iterator[tuple[str, int, Array]]:
        """(tensor, first byte, words): all that this process writes. A collective, whose order all keep."""
        for tensor, held, share in self.shares:
            for first, rows in rows_of(held, share):
                yield tensor.name, first * share.row_bytes, rows

    def bring(self, take: Callable[[str, int, Array], None], failure: OSError | None) -> OSError | None:
        """Hands each of the pieces to `take`, until there is a failure. A collective.

        Then the exchanges go on to their end, which the others wait for.

        Args:
            failure: what has failed before.

        Returns:
            The first failure, or None.
        """
        for piece in self.pieces():
            if failure is None:
                failure = tried(partial(take, *piece))
        return failure


def tried(work: Callable[[], object]) -> OSError | None:
    """Returns what a work has failed with, or None."""
    try:
        work()
    except OSError as error:
        return error
    return None


# In place of a number of the system's.
_OTHER = 1 << 16


def _number_of(failure: OSError) -> int:
    cause = failure.__cause__
    return failure.errno or (cause.errno if isinstance(cause, OSError) else None) or _OTHER


def _why(number: int) -> str:
    return "" if number >= _OTHER else f": {os.strerror(number)}"


def optimizers(model: Any) -> list[Any]:
    """The model's optimizers: the one that it was compiled with, and those that it has as attributes."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    return list({id(x): x for x in found if isinstance(x, BaseOptimizer)}.values())


def named(model: Any, held: Callable[[Any], Held]) -> Iterator[tuple[Tensor, Held]]:
    """Each variable once, under its path; paths that repeat get "#2", "#3"... behind theirs."""
    weights = {id(v) for v in model.weights}
    kinds = [(v, "model") for v in model.weights]
    kinds += [(v, "state") for v in model.variables if id(v) not in weights]
    kinds += [(v, "state") for v in getattr(model, "metrics_variables", ())]
    kinds += [(v, "optimizer") for optimizer in optimizers(model) for v in optimizer.variables]
    seen: set[int] = set()
    names: set[str] = set()
    for variable, kind in kinds:
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        name = numbered(variable.path, names)
        names.add(name)
        one = held(variable)
        yield Tensor(name, one.dtype, one.shape, kind), one
