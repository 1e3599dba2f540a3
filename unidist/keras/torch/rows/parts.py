"""Part: to everybody a tensor of the whole shape; this rank holds a part of it along one dim.

Operations on it go by a table of functions of torch: those that treat each place of the dim alone are computed on the
part; for any other the whole is gathered first. So nothing is assumed of the code that computes with it, and nothing is
wrong that is not in the table: it only sends more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch

from unidist.errors import CapabilityError
from unidist.keras.compat import backend
from unidist.keras.torch.context import Frame
from unidist.keras.torch.rows import rowwise

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class Part(torch.Tensor):
    """A tensor in parts: each rank holds one along the dim `DIM` (torch.chunk's sizes).

    Its shape is the whole one. Functions of torch on it give what they would give of the whole: as parts where they
    treat each place of the dim alone, else of the gathered whole. What writes into it makes it whole first.

    A class of parts says which dim, by which tables functions go, and how parts move.
    """

    DIM: ClassVar[int]
    TABLE: ClassVar[dict[Any, rowwise.Condition]]
    # Functions whose arguments have to be changed for the part: they give None where the whole is needed.
    HANDLERS: ClassVar[dict[Any, Handler]] = {}

    frame: Frame
    _part: torch.Tensor | None
    _whole: torch.Tensor | None

    @classmethod
    def _made(cls, frame: Frame, part: torch.Tensor, shape: tuple[int, ...]) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        made.frame, made._part, made._whole = frame, part, None
        return made

    @property
    def part(self) -> torch.Tensor | None:
        """This rank's part; None once it was written into."""
        return self._part

    def whole(self) -> torch.Tensor:
        """The whole, on every rank. A collective."""
        raise NotImplementedError

    def like(self, part: torch.Tensor, shape: tuple[int, ...]) -> Part:
        """Another one, whose ranks hold their parts alike."""
        raise NotImplementedError

    @staticmethod
    def shaped(func: Any, found: Any) -> Any:
        """What a function of the shape gives."""
        return found

    def goes_with(self, other: Part) -> bool:
        """Whether the ranks hold both alike."""
        raise NotImplementedError

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """What of a whole tensor meets this rank's part."""
        raise NotImplementedError

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a function with a backward of its own gives of whole tensors, each rank all of it. Its backward is given
        whole gradients."""
        return function(*map(whole, args))

    def _serves(self, known: torch.Tensor | None) -> bool:
        """Whether what was gathered before can be used here: not without a gradient where one is wanted."""
        part = self._part
        return known is not None and (known.requires_grad or part is None or not has_gradient(part))

    def __repr__(self) -> str:  # type: ignore[override]
        held = "whole" if self._part is None else tuple(self._part.shape)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, held={held})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = values(args), values(kwargs or {})
        if func in rowwise.OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return cls.shaped(func, func(*args, **kwargs))
        if func in rowwise.OF_THE_GRAPH:
            return func(args[0]._part if args[0]._part is not None else args[0]._whole, *args[1:], **kwargs)
        handler = cls.HANDLERS.get(func)
        found = None if handler is None else handler(func, args, kwargs)
        if found is None and (condition := cls.TABLE.get(func)) is not None:
            found = on_parts(func, condition, args, kwargs)
        if found is not None:
            return found
        out = func(*_wholes(args), **_wholes(kwargs))
        written = [kwargs.get("out"), args[0] if args and rowwise.writes(func, kwargs) else None]
        for x in written:
            if isinstance(x, Part):
                x._part = None
                out = x if out is x._whole else out
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CapabilityError(
            f"{func} was called on a tensor of which each device holds a part, past torch's __torch_function__, as "
            "TorchScript does. Call torch's functions from Python there"
        )


def whole(x: Any) -> Any:
    """What a Part is a part of; anything else as it is."""
    return x.whole() if isinstance(x, Part) else x


def has_gradient(x: torch.Tensor) -> bool:
    """Whether a gradient of it is wanted."""
    return torch.is_grad_enabled() and x.requires_grad


def on_parts(func: Any, condition: rowwise.Condition, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """func of this rank's parts, as parts; None where it is not that of the whole."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Part)]
    if not given or any(x.part is None for x in given):
        return None
    first = given[0]
    ndim, length = first.ndim, first.shape[first.DIM]
    if any(not first.goes_with(x) or x.ndim != ndim or x.shape[first.DIM] != length for x in given):
        return None
    if not condition(ndim, args, kwargs):
        return None
    if not all(_fits(first, x) for x in (*args, *kwargs.values())):
        return None

    def local(x: Any) -> Any:
        if isinstance(x, Part):
            return x.part
        return first.operand(x) if isinstance(x, torch.Tensor) else x

    out = func(*(local(x) for x in args), **{name: local(x) for name, x in kwargs.items()})
    return as_parts(first, out, given)


def as_parts(first: Part, out: Any, given: Sequence[Part] = ()) -> Any:
    """What a function gave of parts, as parts of what it would give of the wholes."""
    if isinstance(out, (tuple, list)):
        parts = [as_parts(first, x, given) for x in out]
        # torch's named tuples take one sequence.
        return type(out)(parts)
    if not isinstance(out, torch.Tensor):
        return out
    for x in given:
        # As it was, to its own dtype or the like: what was gathered of it goes on to serve.
        if out is x.part:
            return x
    dim = first.DIM
    return first.like(out, (*out.shape[:dim], first.shape[dim], *out.shape[dim + 1 :]))


def _fits(first: Part, x: Any) -> bool:
    """Whether an argument means beside parts what it means beside the whole: a constant, or what broadcasts alike."""
    if isinstance(x, torch.Tensor):
        dim = first.DIM - (first.ndim - x.ndim)
        return x.ndim <= first.ndim and (dim < 0 or x.shape[dim] in (1, first.shape[first.DIM]))
    if isinstance(x, (list, tuple)):
        return all(isinstance(entry, int) for entry in x)
    return x is None or isinstance(x, rowwise.CONSTANTS)


def _wholes(value: Any) -> Any:
    return mapped(whole, value)


def values(value: Any) -> Any:
    """With the values of Keras's variables, which torch's functions take as well."""
    return mapped(lambda x: x.value if isinstance(x, backend.Variable) else x, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A function on all leaves of a call's arguments."""
    if isinstance(value, dict):
        return {key: mapped(function, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        found = [mapped(function, x) for x in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return function(value)
