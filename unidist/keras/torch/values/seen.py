"""What a step of the user's own sees of a variable that is cut: its value and its gradient, both whole.

Keras's own step hands each gradient on to the optimizer, and this rank's part of it is enough. A step of the user's own
may do anything with it: take its norm, sort it, write into it, or assign what it computes. So there a cut variable
reads as a Value, and its `grad` is a Gradient. Functions that treat each element alone are computed on this rank's part
of a gradient. For any other the whole is gathered first. What is written goes back to where the ranks keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from unidist.errors import CapabilityError
from unidist.keras.compat import tree
from unidist.keras.torch import carrying, context
from unidist.keras.torch.structures import mapped, values
from unidist.keras.torch.values import elementwise, norms
from unidist.keras.torch.values.storage import Storage

_EACH = elementwise.each()
_EACH_IN_PLACE = elementwise.each_in_place()
_of_a_loop: list[tuple[Any, torch.Tensor, int]] = []
_NOTES = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))


class Seen(torch.Tensor):
    """A tensor of a variable's shape, of which each rank keeps a part.

    Functions of torch on it give what they would give of the whole.
    """

    kept: Storage

    @classmethod
    def _made(cls, storage: Storage, like: torch.Tensor) -> Self:
        shape = storage.shardings.state.shape
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.kept = storage
        return made

    def whole(self) -> torch.Tensor:
        """On every rank. A collective."""
        raise NotImplementedError

    def write(self, whole: torch.Tensor) -> None:
        """Keeps this rank's part of a whole tensor."""
        raise NotImplementedError

    def held(self) -> torch.Tensor:
        """The tensor of this rank."""
        raise NotImplementedError

    def detach(self) -> Seen:
        """The same one: what is written into either is written into both."""
        raise NotImplementedError

    @property
    def data(self) -> Seen:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.write(whole(value).detach())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.kept.path!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = values(args), values(kwargs or {})
        if func in elementwise.OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in elementwise.OF_THE_GRAPH:
            return func(args[0].held(), *args[1:], **kwargs)
        if getattr(func, "__name__", "") in _NOTES:
            raise CapabilityError(
                f"{func.__name__} was called on {args[0]!r}, which is cut among the ranks: change its gradient behind "
                "loss.backward() in train_step"
            )
        settle()
        found = _on_parts(func, args, kwargs)
        if found is not NotImplemented:
            return found
        if elementwise.writes(func, kwargs) or kwargs.get("out") is not None:
            return _written(func, args, kwargs)
        return _on_wholes(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} reached a {cls.__name__} past its __torch_function__")


class Value(Seen):
    """The value of a cut variable. `grad` is its reduced gradient."""

    _is_detached: bool

    @staticmethod
    def of(storage: Storage, *, detached: bool = False) -> Value:
        made = Value._made(storage, storage.own(context.frame()))
        made._is_detached = detached
        return made

    def whole(self) -> torch.Tensor:
        frame, storage = context.frame(), self.kept
        if not self._is_detached and torch.is_grad_enabled():
            is_gathered = frame is None or storage.is_sharded
            return storage.whole(frame, differentiable=True) if is_gathered else storage.local(frame)
        with torch.no_grad():
            found = storage.whole(frame)
            # What was fetched is let go while somebody may still look at it.
            return found.detach() if storage.is_kept else found.clone()

    def write(self, whole: torch.Tensor) -> None:
        _check_shape(self.kept, whole)
        self.kept.assign(whole)

    def held(self) -> torch.Tensor:
        own = self.kept.own(context.frame())
        return own.detach() if self._is_detached else own

    def detach(self) -> Value:
        return Value.of(self.kept, detached=True)

    @property
    def grad(self) -> Gradient | None:
        found = None if self._is_detached else self.kept.own(context.frame()).grad
        return None if found is None else Gradient.of(self.kept, found)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        frame = context.frame()
        if value is None:
            self.kept.forget_gradients(self.kept.rank_at_work(context.frame()))
            return
        self.kept.own(frame).grad = part_of(value, self.kept)


class Gradient(Seen):
    """The gradient of a cut variable, or what was computed from it element by element. `part` is this rank's."""

    part: torch.Tensor

    @staticmethod
    def of(storage: Storage, part: torch.Tensor) -> Gradient:
        made = Gradient._made(storage, part)
        made.part = part
        return made

    def whole(self) -> torch.Tensor:
        return self.kept.joined(self.part)

    def write(self, whole: torch.Tensor) -> None:
        _check_shape(self.kept, whole)
        with torch.no_grad():
            self.part.copy_(whole[self.kept.shardings.state.slices(self.kept.rank_at_work(context.frame()))])

    def held(self) -> torch.Tensor:
        return self.part

    def detach(self) -> Gradient:
        return Gradient.of(self.kept, self.part.detach())

    @property
    def grad(self) -> None:  # type: ignore[override]
        return None


def whole(x: Any) -> Any:
    """What a value or a gradient that is cut stands for; anything else as it is."""
    return x.whole() if isinstance(x, Seen) else x


def part_of(grad: torch.Tensor, storage: Storage) -> torch.Tensor:
    """This rank's part of a gradient of the whole variable.

    Raises:
        ValueError: it has another shape.
    """
    state = storage.shardings.state
    if isinstance(grad, Gradient) and grad.kept.shardings.state == state:
        return grad.part
    found: torch.Tensor = whole(grad)
    _check_shape(storage, found)
    return found[state.slices(storage.rank_at_work(context.frame()))]


def settle() -> None:
    """What was written into a view of a whole tensor goes back to where the ranks keep it."""
    lent = _lent()
    given = lent.copy()
    lent.clear()
    for seen, tensor, version in given:
        if tensor._version != version:
            seen.write(tensor)


def _check_shape(storage: Storage, found: torch.Tensor) -> None:
    if tuple(found.shape) != storage.shardings.state.shape:
        raise ValueError(
            f"{storage.path!r} has shape {storage.shardings.state.shape}; found a value or a gradient for it of shape "
            f"{tuple(found.shape)}"
        )


def _on_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    read: list[tuple[Seen, torch.Tensor]] = []

    def fetched(x: Any) -> Any:
        if isinstance(x, Seen):
            read.append((x, x.whole()))
            return read[-1][1]
        return x

    out = func(*mapped(fetched, args), **mapped(fetched, kwargs))
    found = [x for x in tree.flatten(out) if isinstance(x, torch.Tensor)]
    _lent().extend((seen, tensor, tensor._version) for seen, tensor in read if _is_shared(tensor, found))
    return out


def _lent() -> list[tuple[Seen, torch.Tensor, int]]:
    """Whole tensors of which somebody has views, and their versions: of the rank at work, or of a loop."""
    frame = context.frame()
    return _of_a_loop if frame is None else frame.lent


def _is_shared(tensor: torch.Tensor, found: Sequence[torch.Tensor]) -> bool:
    """Whether something is a view of a tensor into which may be written."""
    if tensor.requires_grad:
        return False
    root = tensor if tensor._base is None else tensor._base
    return any(x is tensor or x._base is root for x in found)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """A function that writes into whole copies, whose parts are kept."""
    into = [kwargs.get("out")]
    if args and elementwise.writes(func, kwargs):
        into += args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    copies = {id(x): x.whole().detach().clone() for x in into if isinstance(x, Seen)}

    def given(x: Any) -> Any:
        return copies[id(x)] if id(x) in copies else whole(x)

    with torch.no_grad():
        out = func(*mapped(given, args), **mapped(given, kwargs))
    seen = {id(copies[id(x)]): x for x in into if isinstance(x, Seen)}
    for x in seen.values():
        x.write(copies[id(x)])
    return mapped(lambda x: seen.get(id(x), x), out)


def _on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """A function on this rank's part alone, or NotImplemented where it looks at more."""
    first = args[0] if args else None
    if isinstance(first, Gradient) and (norm := norms.norm_of(func, args, kwargs)) is not None:
        return norms.of_part(first.part, first.kept, norm)
    in_place = func in _EACH_IN_PLACE
    if not in_place and not (func in _EACH and _EACH[func](0, args, kwargs)):
        return NotImplemented
    given = [*args, *kwargs.values()]
    gradients = [x for x in given if isinstance(x, Gradient)]
    if gradients:
        args, kwargs = mapped(carrying.whole, args), mapped(carrying.whole, kwargs)
        given = [*args, *kwargs.values()]
    if not gradients or (in_place and not isinstance(first, Gradient)):
        return NotImplemented
    state = gradients[0].kept.shardings.state
    if any(x.kept.shardings.state != state for x in gradients) or not all(_fits(state.shape, x) for x in given):
        return NotImplemented
    at = state.slices(gradients[0].kept.rank_at_work(context.frame()))

    def local(x: Any) -> Any:
        if isinstance(x, Gradient):
            return x.part
        x = whole(x)
        if not isinstance(x, torch.Tensor) or x.numel() == 1:
            return x
        return torch.broadcast_to(x, state.shape)[at]

    out = func(*map(local, args), **{name: local(x) for name, x in kwargs.items()})
    return first if in_place else Gradient.of(gradients[0].kept, out)


def _fits(shape: tuple[int, ...], x: Any) -> bool:
    """Whether beside a part it means what it means beside the whole: a constant, or what broadcasts to the shape."""
    if isinstance(x, Seen):
        return tuple(x.shape) == shape
    if isinstance(x, torch.Tensor):
        if x.requires_grad and torch.is_grad_enabled():
            return False
        lengths = zip(reversed(x.shape), reversed(shape), strict=False)
        return x.ndim <= len(shape) and all(n in (1, m) for n, m in lengths)
    return x is None or isinstance(x, elementwise.CONSTANTS)
