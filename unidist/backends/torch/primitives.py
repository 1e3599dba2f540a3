"""The few operations of torch.distributed that collectives are made of: at once, or traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from unidist.algebra.layout import ReduceOp
from unidist.backends.torch.reducing import FOLD, NATIVE
from unidist.backends.torch.transports import Transport

# torch 2.13 gave both a new name and warns of the old one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Places(Protocol):
    """A group of processes, seen from one of them."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...


W = TypeVar("W", bound=Places)
W_contra = TypeVar("W_contra", bound=Places, contravariant=True)


class Primitives(Protocol[W_contra]):
    """On contiguous tensors of dtypes that every transport has; inputs are left alone, results are new.

    Tensors have at least one dim; every member comes with the same shape (all_to_all: with fitting splits), of
    more than no elements.
    """

    def all_reduce(self, x: torch.Tensor, transport: W_contra, op: ReduceOp) -> torch.Tensor:
        """Returns the sum, max, min or prod; the sum for a mean.

        A max or min of integers alone: of floats transports lose NaN.
        """

    def all_gather(self, x: torch.Tensor, transport: W_contra) -> torch.Tensor:
        """Joined along dim 0."""

    def reduce_scatter(self, x: torch.Tensor, transport: W_contra, op: ReduceOp) -> torch.Tensor:
        """This place's part of equal parts along dim 0; the sum for a mean."""

    def all_to_all(
        self, x: torch.Tensor, transport: W_contra, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        """Parts of those lengths along dim 0 to and from each place."""

    def broadcast(self, x: torch.Tensor, transport: W_contra, root: int) -> torch.Tensor: ...


class Eager:
    """Runs primitives at once.

    On CUDA "at once" is on the current stream, as torch's Work.wait() has it.
    """

    def all_reduce(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        out = x.clone()
        transport.pg.allreduce([out], NATIVE[op]).wait()
        return out

    def all_gather(self, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        out = x.new_empty((transport.size * x.shape[0], *x.shape[1:]))
        all_gather_single(out, x, group=transport.pg)
        return out

    def reduce_scatter(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        out = x.new_empty((x.shape[0] // transport.size, *x.shape[1:]))
        reduce_scatter_single(out, x, NATIVE[op], group=transport.pg)
        return out

    def all_to_all(
        self, x: torch.Tensor, transport: Transport, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x, list(received), list(sent), group=transport.pg)
        return out

    def broadcast(self, x: torch.Tensor, transport: Transport, root: int) -> torch.Tensor:
        out = x.clone()
        dist.broadcast(out, group=transport.pg, group_src=root)
        return out


class Traced:
    """Primitives that torch.compile puts into its graph: torch's functional collectives."""

    _NAMES = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "product"}  # noqa: RUF012

    def all_reduce(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        return _waited(torch.ops._c10d_functional.all_reduce(x, self._NAMES[op], transport.name))

    def all_gather(self, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        return _waited(_gathered(x, transport))

    def reduce_scatter(self, x: torch.Tensor, transport: Transport, op: ReduceOp) -> torch.Tensor:
        return _folded(_waited(_scattered(x, self._NAMES[op], transport)), op, x.shape[0] // transport.size)

    def all_to_all(
        self, x: torch.Tensor, transport: Transport, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        moved = torch.ops._c10d_functional.all_to_all_single(x, list(received), list(sent), transport.name)
        return _waited(moved)

    def broadcast(self, x: torch.Tensor, transport: Transport, root: int) -> torch.Tensor:
        return _waited(torch.ops._c10d_functional.broadcast(x, root, transport.name))


def begin(op: str, x: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Puts the start of a sum, or of an all_gather, into a program.

    Gives its result, which `arrived` waits for. What is computed in between may overlap with it.
    """
    functional = torch.ops._c10d_functional
    if op == "all_gather":
        begun = _gathered(x, transport)
    elif op == "reduce_scatter":
        begun = _scattered(x, "sum", transport)
    else:
        begun = functional.all_reduce(x, "sum", transport.name)
    found: torch.Tensor = begun
    return found


def arrived(op: str, x: torch.Tensor) -> torch.Tensor:
    """Puts the wait for what `begin` gave into a program."""
    found = _waited(x)
    return _folded(found, "sum", 1) if op == "reduce_scatter" else found


def _gathered(x: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Starts an all_gather: over gloo an exchange in which each place sends its part to all.

    gloo's own, as functional collectives call it, writes beyond the memory of others where two of different sizes are
    under way at once (seen in torch 2.13).
    """
    if _is_exchanged(x, transport):
        return _exchanged(x.expand(transport.size, *x.shape).flatten(0, 1), transport)
    found: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(x, transport.size, transport.name)
    return found


def _scattered(x: torch.Tensor, name: str, transport: Transport) -> torch.Tensor:
    """Starts a reduce_scatter: over gloo an exchange of parts, which `_folded` reduces.

    gloo's own is an all_reduce of everything.
    """
    if _is_exchanged(x, transport):
        return _exchanged(x, transport)
    found: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(x, name, transport.size, transport.name)
    return found


def _is_exchanged(x: torch.Tensor, transport: Transport) -> bool:
    return transport.is_gloo and x.is_cpu


def _exchanged(parts: torch.Tensor, transport: Transport) -> torch.Tensor:
    sizes = [parts.shape[0] // transport.size] * transport.size
    found: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(parts, sizes, sizes, transport.name)
    return found


def _folded(parts: torch.Tensor, op: ReduceOp, length: int) -> torch.Tensor:
    """Reduces what came of each place, in rank order; what is reduced already is the one part."""
    found: torch.Tensor = functools.reduce(FOLD[op], parts.split(length))
    return found


def _waited(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out
