"""Shows a cut variable to a step of the user's own: its value and its gradient, both whole.

Keras's own step hands each gradient on to the optimizer, and this rank's part of it is enough. A step of the user's own
may do anything with it: take its norm, sort it, write into it, or assign what it computes. So there a cut variable
reads as a Value, and its `grad` is a carrier of this rank's part, which goes by rules. Functions on a Value gather it.
What is written into either goes back to where the ranks keep it.
"""

from __future__ import annotations

from typing import Any

import torch

from unidist.algebra import Sharding
from unidist.backends.torch.sharded import ShardedTensor, Space, Spec, wrap
from unidist.backends.torch.sharded.binding import functions
from unidist.backends.torch.sharded.tensor import moved
from unidist.errors import CapabilityError
from unidist.keras import saving
from unidist.keras.torch import carrying, context
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.structures import mapped, values
from unidist.propagation.layouts import Cut

_OF_THE_SHAPE = frozenset(
    functions(
        "shape dtype device ndim layout is_meta is_cuda is_cpu is_sparse is_quantized is_nested is_mkldnn itemsize "
        "nbytes _version size dim ndimension numel nelement element_size is_floating_point is_complex is_signed "
        "get_device __len__ __hash__",
        (torch.Tensor,),
    )
)
_OF_THE_GRAPH = frozenset(functions("requires_grad grad_fn is_leaf", (torch.Tensor,)))
_NOTES = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))


class Value(torch.Tensor):
    """The value of a cut variable. Functions of torch on it give what they would give of the whole.

    Attributes:
        kept: where the ranks keep it.
    """

    kept: Storage
    _is_detached: bool

    @staticmethod
    def of(storage: Storage, *, detached: bool = False) -> Value:
        shape, own = storage.shardings.state.shape, storage.own(context.frame())
        made: Value = torch.Tensor._make_wrapper_subclass(Value, shape, dtype=own.dtype, device=own.device)
        made.kept, made._is_detached = storage, detached
        return made

    def read(self) -> torch.Tensor:
        """Gives the whole where gradients are wanted, else the stored part as the whole.

        What is written into that part is written into the variable.
        """
        frame, storage = context.frame(), self.kept
        if not self._is_detached and torch.is_grad_enabled():
            is_gathered = frame is None or storage.is_sharded
            return storage.whole(frame, differentiable=True) if is_gathered else storage.local(frame)
        if frame is None and saving.is_writing():
            return storage.whole(None).detach()  # which counts what a walk that breaks off has come by
        part = storage.lent(storage.rank_at_work(frame)).detach()
        return carried(storage, part, storage.shardings.stored)

    def whole(self) -> torch.Tensor:
        """On every rank. A collective."""
        found: torch.Tensor = carrying.whole(self.read())
        return found

    def held(self) -> torch.Tensor:
        """The tensor of this rank."""
        own = self.kept.own(context.frame())
        return own.detach() if self._is_detached else own

    def detach(self) -> Value:
        """The same one: what is written into either is written into both."""
        return Value.of(self.kept, detached=True)

    @property
    def data(self) -> Value:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _check_shape(self.kept, value)
        self.kept.assign(carrying.whole(whole(value)).detach())

    @property
    def grad(self) -> torch.Tensor | None:
        found = None if self._is_detached else self.kept.own(context.frame()).grad
        return None if found is None else carried(self.kept, found)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        frame = context.frame()
        if value is None:
            self.kept.forget_gradients(self.kept.rank_at_work(frame))
            return
        self.kept.own(frame).grad = part_of(value, self.kept)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Value({self.kept.path!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = values(args), values(kwargs or {})
        if func in _OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _OF_THE_GRAPH:
            return func(args[0].held(), *args[1:], **kwargs)
        if getattr(func, "__name__", "") in _NOTES:
            raise CapabilityError(
                f"{func.__name__} was called on {args[0]!r}, which is cut among the ranks: change its gradient behind "
                "loss.backward() in train_step"
            )
        return func(*mapped(read, args), **mapped(read, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} reached a {cls.__name__} past its __torch_function__")


def read(x: Any) -> Any:
    """Gives torch the value of a variable that is cut; anything else stays as it is."""
    return x.read() if isinstance(x, Value) else x


def whole(x: Any) -> Any:
    """The value of a variable that is cut; anything else as it is."""
    return x.whole() if isinstance(x, Value) else x


def _spec_of(storage: Storage, sharding: Sharding) -> Spec:
    """A layout of a variable on the rank at work."""
    world, rank = storage.world, storage.rank_at_work(context.frame())
    cuts = [(dim, axes) for dim, axes in enumerate(sharding.layout.dims) if axes]
    lines = tuple(axes for _, axes in cuts)
    key: Any = (rank, lines)
    space: Space | None = world.spaces.get(key)
    if space is None:
        space = world.spaces[key] = Space.of(world.backend, world.mesh, lines, invariant=True)
        space.exact = space.frugal = True  # ranks' generators stand alike in a step (drawing.py)
    return space.spec(tuple(Cut(dim, sharding.pieces(rank, dim, axes)) for dim, axes in cuts), sharding.shape)


def carried(storage: Storage, part: torch.Tensor, sharding: Sharding | None = None) -> torch.Tensor:
    """Gives this rank's part as the whole: a gradient's, or one in another layout of the variable.

    A part that is the whole is given itself.
    """
    sharding = sharding or storage.shardings.state
    if not sharding.layout.dims:
        return part
    out = wrap(part, _spec_of(storage, sharding))
    out.why = storage.path
    return out


def part_of(grad: torch.Tensor, storage: Storage) -> torch.Tensor:
    """This rank's part of a gradient of the whole variable.

    Raises:
        ValueError: it has another shape.
    """
    _check_shape(storage, grad)
    state = storage.shardings.state
    if type(grad) is ShardedTensor and state.layout.dims:
        spec = _spec_of(storage, state)
        if grad.spec.space is spec.space:
            return moved(grad, spec.states)
    found: torch.Tensor = carrying.whole(whole(grad))
    return found[state.slices(storage.rank_at_work(context.frame()))]


def _check_shape(storage: Storage, found: torch.Tensor) -> None:
    if tuple(found.shape) != storage.shardings.state.shape:
        raise ValueError(
            f"{storage.path!r} has shape {storage.shardings.state.shape}; found a value or a gradient for it of shape "
            f"{tuple(found.shape)}"
        )
