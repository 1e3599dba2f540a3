"""Moves inside programs that torch.compile traces.

torch.compile does not look into a plan: each move is entered here under a number while the program is compiled, and the
program holds a call of `traced` with that number. Below it, functional collectives go into the graph, where the
compiler may move and overlap them. They are not in the ledger of a run: what a compiled program sends is what its plans
predict. (Who traces by TorchBackend.into_program gets what a run sends.)

The compiler takes a second to import. It is not imported here, but where it first looks for `traced`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.local import Both

_F = TypeVar("_F", bound=Callable[..., Any])
_moves: list[Both[torch.Tensor]] = []


def number_of(known: dict[Hashable, int], key: Hashable, make: Callable[[], Both[torch.Tensor]]) -> int:
    """Returns the number of a move, entered on the first call.

    `known` is its world's: another world's moves are others.
    """
    number = known.get(key)
    if number is None:
        _moves.append(make())
        number = known[key] = len(_moves) - 1
    return number


def __getattr__(name: str) -> Any:
    """`traced(x, number)`: the move of that number, differentiable; it enters a graph as it is."""
    if name != "traced":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = torch.compiler.allow_in_graph(_traced)
    return found


def constant(function: _F) -> _F:
    """Marks a function's result as a constant of the graph.

    torch.compiler.assume_constant_result does the same (torch 2.13), but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _traced(x: torch.Tensor, number: int) -> torch.Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _moves[number][0](x)
    out: torch.Tensor = _Traced.apply(number, x)  # type: ignore[no-untyped-call]
    return out


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, x: torch.Tensor) -> torch.Tensor:
        ctx.number = number
        return _moves[number][0](x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _moves[ctx.number][1](grad)


# A Sharding that is made inside a compiled program is no constant to torch.compile, but its numbers and names are.
Parts = tuple[Any, ...]


def parts(sharding: Sharding) -> Parts:
    mesh, layout = sharding.mesh, sharding.layout
    # operator.index fixes a size that torch.compile holds open: a move is made for one shape.
    shape = tuple(operator.index(size) for size in sharding.shape)
    return mesh.axes, mesh.devices, layout.dims, layout.partial, layout.fanout, shape


def whole(of: Parts) -> Sharding:
    axes, devices, dims, partial, fanout, shape = of
    return Sharding(Mesh(dict(axes), devices), Layout(*dims, partial=dict(partial), fanout=fanout), shape)
