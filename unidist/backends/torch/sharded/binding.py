"""The table from torch's functions to rules: what a call's tensors and static arguments are to a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from unidist.backends.torch.sharded.space import Space
from unidist.propagation.choosing import Decision, Rule

# The local operation, where it is not the function itself on the parts: parts, arguments.
Local = Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]

# torch takes these names of NumPy's too.
NUMPYS = {"dim": "axis", "keepdim": "keepdims"}


class Call:
    """A function's arguments, asked by place or name."""

    __slots__ = ("args", "func", "kwargs", "space")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], space: Space) -> None:
        self.func, self.args, self.kwargs, self.space = func, args, kwargs, space

    def get(self, place: int, *names: str, default: Any = None) -> Any:
        if len(self.args) > place:
            return self.args[place]
        every = (*names, *(NUMPYS[name] for name in names if name in NUMPYS))
        return next((self.kwargs[name] for name in every if name in self.kwargs), default)

    def rest(self, place: int, *names: str) -> Any:
        """One argument, or all from a place on: sizes come as f(x, 2, 3) and as f(x, (2, 3))."""
        if len(self.args) > place + 1:
            return self.args[place:]
        found = self.get(place, *names)
        return found if isinstance(found, (tuple, list)) or found is None else (found,)


@dataclass(frozen=True, slots=True)
class Bound:
    """A call as a rule sees it.

    Attributes:
        rule: over one axis.
        operands: the tensors that it is about; None: all of the call, in their order.
        local: makes the local operation of what was chosen; None: the function itself.
        aliases: whether torch would give a view of its first operand.
        nests: whether the local operation may be given carriers of another space.
        gathers_little: whether to make wholes is the better way, and no lack of a rule.
    """

    rule: Rule
    operands: Sequence[Any] | None = None
    local: Callable[[Decision], Local] | None = None
    aliases: bool = False
    nests: bool = False
    gathers_little: bool = False


@dataclass(frozen=True, slots=True)
class Composed:
    """A call that is made of others, each with a rule: called with the arguments."""

    run: Callable[..., Any]


# None: no rule for these arguments.
Binding = Callable[[Call], Bound | Composed | None]
TABLE: dict[Any, Binding] = {}
# Called with (func, args, kwargs) at once, for what no layout matters to.
Direct = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
DIRECT: dict[Any, Direct] = {}
# The same for functions of torch.autograd by name. torch names whatever stands there, which others may have replaced.
AUTOGRAD: dict[str, Direct] = {}
EVERYWHERE = (torch, torch.Tensor, F, torch.special, torch.linalg)


def direct(func: Any) -> Direct | None:
    """Returns what serves a function without a plan."""
    standing = (run for name, run in AUTOGRAD.items() if getattr(torch.autograd, name, None) is func)
    return DIRECT.get(func) or next(standing, None)


def functions(names: str, places: Sequence[Any] = EVERYWHERE) -> list[Any]:
    """Returns the functions of these names that this torch has."""
    found = []
    for name in names.split():
        for place in places:
            function = getattr(place, name, None)
            if function is not None:
                found.append(function.__get__ if _is_property(function) else function)
    return found


def _is_property(function: Any) -> bool:
    return not callable(function) and hasattr(function, "__get__")


def bind(names: str, binding: Binding, places: Sequence[Any] = EVERYWHERE) -> None:
    for function in functions(names, places):
        TABLE.setdefault(function, binding)


def binds(names: str, places: Sequence[Any] = EVERYWHERE) -> Callable[[Binding], Binding]:
    def register(binding: Binding) -> Binding:
        bind(names, binding, places)
        return binding

    return register


def directly(names: str, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    for function in functions(names, (torch.Tensor, torch)):
        DIRECT.setdefault(function, run)
