"""The number of rows, as code knows it that has the rows of all shards in view.

A shape may have it: a tensor of as many ones is this shard's where only its rows are there. Who computes with the
number, as for a mean by hand, looks at the rows of all shards. A first call shows it, as it shows other rows
(regions.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unidist.keras.compat import dtypes
from unidist.keras.interception import Hook
from unidist.keras.torch import context
from unidist.keras.torch.rows import rowwise

# Functions of torch that make a shape of numbers.
_SHAPING = frozenset(
    rowwise.named(
        [
            *("reshape", "view", "expand", "broadcast_to", "repeat", "tile", "unflatten"),
            *("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"),
        ]
    )
)
# Those that draw as many numbers as a shape has.
_DRAWING = frozenset(rowwise.named(["rand", "randn", "randint", "normal", "bernoulli", "poisson"]))
# Whose code only makes shapes of it.
_KNOWN = ("keras.", "unidist.")


class Count(int):
    """A number of rows, or one that was computed from it."""

    def __truediv__(self, other: Any) -> Any:
        _look()
        return int(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        _look()
        return other / int(self)

    def __float__(self) -> float:
        _look()
        return float(int(self))

    def __int__(self) -> int:
        if not _caller().startswith(_KNOWN):
            _look()
        return int.__int__(self)


def _counting(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(int, name)

    def compute(*args: Any) -> Any:
        found = function(*args)
        return Count(found) if isinstance(found, int) else found

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(Count, f"__{_side}{_name}__", _counting(f"__{_side}{_name}__"))


def hooks() -> Iterator[Hook]:
    """Keras asks of which type a number is."""
    yield Hook(
        dtypes, "PYTHON_DTYPES_MAP", lambda known: {**known, Count: known[int]}, "numbers of rows are whole numbers"
    )


class Counting(TorchFunctionMode):
    """Inside, a function of torch that computes with a number of rows looks at the rows of all shards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Python makes a plain number of a length.
        is_length = getattr(func, "__name__", "") == "__len__" and not _caller().startswith(_KNOWN)
        if is_length or (func not in _SHAPING and _has_counts([*args, *kwargs.values()])):
            _look(draws=func in _DRAWING)
        return func(*args, **kwargs)


def counted(func: Any, found: Any) -> Any:
    """What a function of a RowPart's shape gives: with a Count for the rows."""
    name = getattr(func, "__name__", "")
    if isinstance(found, torch.Size):
        return torch.Size([Count(found[0]), *found[1:]]) if found else found
    return Count(found) if name in ("numel", "nelement") or (name == "size" and isinstance(found, int)) else found


def _look(draws: bool = False) -> None:
    frame = context.frame()
    if frame is None or frame.region is None:
        return
    if draws:
        frame.region.draw()
    else:
        frame.region.look()


def _caller() -> str:
    """The module of who has asked: not this one's, and none of torch's, whose functions stand between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).startswith(("torch.", __name__)):
        frame = frame.f_back
    return _module_of(frame)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _has_counts(values: Iterable[Any]) -> bool:
    for x in values:
        if isinstance(x, Count):
            return True
        if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size) and _has_counts(x):
            return True
        if isinstance(x, slice) and _has_counts([x.start, x.stop, x.step]):
            return True
    return False
