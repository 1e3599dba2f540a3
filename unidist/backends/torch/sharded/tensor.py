"""ShardedTensor: a tensor that carries its layout. To the code that uses it, it is the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from unidist import events
from unidist.backends.torch.sharded.moving import carried, plain_in, renewed, unshared
from unidist.backends.torch.sharded.space import Space, Spec
from unidist.errors import CapabilityError, LayoutError
from unidist.propagation.layouts import PARTIAL, WHOLE, States, cut_dims

NONE: dict[str, Any] = {}
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Aside:
    """Holds what few carriers have beside their part.

    Attributes:
        moved: the part in other layouts that somebody has asked for, with the version of the part then.
        joined: the carrier without partial sums, once somebody has joined it: nobody shall pay again.
        origin: where it was copied from though torch would give a view.
        written: the version of the plain value that it has left, when that was made.
    """

    __slots__ = ("gradient", "joined", "moved", "origin", "written")

    def __init__(self) -> None:
        self.moved: dict[States, tuple[int, torch.Tensor]] = {}
        self.joined: tuple[int, ShardedTensor] | None = None
        self.origin: Origin | None = None
        self.gradient: ShardedTensor | None = None
        self.written = -1


_Tensor: Any = torch.Tensor
# A class attribute hides torch's property of the name.
_SET_LATER: Any = None
_LEFT: States = ("left",)
_NUMBER = torch.ops.aten._local_scalar_dense.default


class ShardedTensor(_Tensor):  # type: ignore[misc]
    """This rank's part of a tensor, and its layout.

    It stands above autograd: torch differentiates the part. What is read most is a plain attribute here: torch's own
    properties each go through `__torch_function__`.

    Attributes:
        local: this rank's part.
        spec: the layout, in its space.
        shape: the global one, as everything that a tensor says of itself.
        why: the purpose of what is sent to make it plain, of it and of what is made of it; "": that of whoever asks.
    """

    local: torch.Tensor = _SET_LATER
    spec: Spec = _SET_LATER
    aside: Aside | None = None
    why: str = ""
    shape: torch.Size = _SET_LATER
    dtype: torch.dtype = _SET_LATER
    device: torch.device = _SET_LATER
    ndim: int = _SET_LATER
    is_meta: bool = False
    # Set by calls.py and autograd.py, which are above this module.
    dispatch: Handler
    gradient_of: Callable[[Any], Any]
    set_gradient: Callable[[Any, Any], None]

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad_(value)

    @property
    def grad_fn(self) -> Any:
        return self.local.grad_fn

    @property
    def is_leaf(self) -> bool:
        return self.local.is_leaf

    @property
    def grad(self) -> Any:
        return ShardedTensor.gradient_of(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        ShardedTensor.set_gradient(self, value)

    @property
    def _version(self) -> int:
        return self.local._version

    def whole(self) -> torch.Tensor:
        """Gives the value as a plain tensor, gathered where that needs it: all ranks must ask.

        Others are given the same one: clone it before writing into it.
        """
        return left(self) if self.spec.space.invariant else plain(moved(self, (WHOLE,) * len(self.spec.states)))

    def redistribute(self, spec: Spec) -> ShardedTensor:
        """This value in another layout, of the same shape. A tensor of its own."""
        return wrap(moved(self, spec.states).clone(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Says nothing that other ranks would have to come for: what only one rank prints must not wait."""
        if self.spec.whole:
            return f"ShardedTensor({self.local!r}, {self.spec!r})"
        return f"ShardedTensor(shape={tuple(self.shape)}, {self.spec!r}, local={self.local!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and not all(kind in _SERVED for kind in types):
            return NotImplemented  # another kind of tensor, which may know this one
        return ShardedTensor.dispatch(func, args, kwargs or NONE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _NUMBER:  # an argument that torch wants as a number: torch.arange(x), torch.full(size, x)
            return args[0].whole().item()
        raise CapabilityError(
            f"{func} reached the inside of a sharded tensor, which holds nothing: something called torch past "
            "__torch_function__; give it x.whole()"
        )


_SERVED = (ShardedTensor, torch.Tensor, torch.nn.Parameter)
_make = torch.Tensor._make_wrapper_subclass


def wrap(local: torch.Tensor, spec: Spec) -> ShardedTensor:
    """A part as a carrier. Nothing is checked."""
    shape, dtype, device = spec.shape, local.dtype, local.device
    x: ShardedTensor = _make(ShardedTensor, shape, dtype=dtype, device=device)
    x.local, x.spec, x.shape, x.dtype, x.device, x.ndim = local, spec, shape, dtype, device, len(shape)
    return x


def from_local(local: torch.Tensor, spec: Spec) -> ShardedTensor:
    """A carrier of this rank's part.

    Raises:
        LayoutError: the part has not the shape that this rank holds.
    """
    if local.shape != spec.local:
        raise LayoutError(
            f"rank {spec.space.rank} gave a part of shape {tuple(local.shape)}, but under {spec} a tensor of shape "
            f"{tuple(spec.shape)} has {tuple(spec.local)} there"
        )
    return wrap(local, spec)


def distribute(x: torch.Tensor, spec: Spec) -> ShardedTensor:
    """A carrier of a tensor that every rank holds alike. Of a sum the first place holds all."""
    part = carried(spec.space, x, (WHOLE,) * len(spec.states), spec.states)
    return wrap(part.clone() if shares(part, x) and not spec.whole else part, spec)


def version(x: torch.Tensor) -> int:
    """Returns the version of a tensor's memory: what is written in place counts it on.

    Inference tensors have none and are not kept.
    """
    if type(x) is ShardedTensor:
        return version(x.local)
    return -1 if x.is_inference() else x._version


def moved(x: ShardedTensor, want: States, *, nested: bool = False) -> torch.Tensor:
    """The part of a carrier in a layout, kept until that is written to. `nested`: a carrier inside stays."""
    spec = x.spec
    if x.aside is not None:
        follow(x, x.aside)
    if spec.states == want:
        return x.local if nested else plain(x.local)
    now, aside = version(x.local), aside_of(x)
    kept = _kept(x, aside, want, now)
    if kept is not None:
        return kept
    with events.for_purpose(events.purpose() or x.why):
        out = _carried(spec, x.local, want)
    if now >= 0 and not _is_too_large(x, out):
        aside.moved[want] = now, out
        if spec.partial and all(
            w in (h, WHOLE) and (w == h or h == PARTIAL) for h, w in zip(spec.states, want, strict=True)
        ):
            joined = wrap(out, spec.space.spec(want, spec.shape))
            aside_of(joined).origin = Origin(x, out, want)  # who takes a view of it takes one of a copy
            aside.joined = now, joined
    return out


def _carried(spec: Spec, part: torch.Tensor, want: States) -> torch.Tensor:
    """Returns a part in another layout.

    One that is a carrier itself stays one, where no dim is cut in both spaces.
    """
    if type(part) is not ShardedTensor:
        return carried(spec.space, part, spec.states, want)
    inner = part.spec
    if not set(cut_dims(inner.states)).isdisjoint((*cut_dims(spec.states), *cut_dims(want))):
        return carried(spec.space, plain(part), spec.states, want)
    out = carried(spec.space, part.local, spec.states, want)
    return wrap(out, inner.space.spec_of(inner.states, out.shape))


def aside_of(x: ShardedTensor) -> Aside:
    if x.aside is None:
        x.aside = Aside()
    return x.aside


def _kept(x: ShardedTensor, aside: Aside, states: States, now: int) -> torch.Tensor | None:
    """Returns what somebody has asked for before, if it was not written to since."""
    kept = aside.moved.get(states)
    return kept[1] if kept is not None and kept[0] == now and usable(kept[1], x.local) else None


def left(x: ShardedTensor) -> torch.Tensor:
    """Returns the value of a carrier of an invariant space as a plain tensor.

    Its gradient comes whole to every rank.
    """
    now, aside = version(x.local), aside_of(x)
    kept = _kept(x, aside, _LEFT, now)
    if kept is not None:
        return kept
    fanned = _kept(x, aside, (WHOLE,) * len(x.spec.states), now)
    with events.for_purpose(x.why or events.purpose()):
        # Of one that was gathered already, with a gradient of each rank's own, this gradient goes with that one's.
        have = (fanned, (WHOLE,) * len(x.spec.states)) if fanned is not None else (x.local, x.spec.states)
        out = unshared(x.spec.space, plain(have[0]), have[1])
    if now >= 0 and not _is_too_large(x, out):
        aside.moved[_LEFT], aside.written = (now, out), version(out)
    return out


def follow(x: ShardedTensor, aside: Aside) -> bool:
    """Writes into a carrier what was written into the value that it has left; whether anything was."""
    _, out = aside.moved.get(_LEFT, (-1, None))
    if wrote := out is not None and version(out) != aside.written and not shares(out, x.local):
        x.local = renewed(x.local, plain_in(x.spec.space, out, x.spec.states))
        aside.moved, aside.joined, aside.written = {_LEFT: (version(x.local), out)}, None, version(out)
    return wrote


def _is_too_large(x: ShardedTensor, out: torch.Tensor) -> bool:
    """Returns whether a copy of a carrier in another layout is not kept beside it."""
    return x.spec.space.frugal and out.numel() > x.local.numel()


def plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor that may be a carrier of an invariant space, without one."""
    return left(x) if type(x) is ShardedTensor else x


def as_whole(space: Space, x: torch.Tensor) -> torch.Tensor:
    """Carries what all ranks have made alike of wholes."""
    return x if space.invariant else wrap(x, space.whole(x.shape))


def usable(kept: torch.Tensor, source: torch.Tensor) -> bool:
    """Returns whether a kept value may serve: one made without a gradient cannot, where one is needed."""
    return kept.requires_grad or not (source.requires_grad and torch.is_grad_enabled())


class Origin:
    """Says where a copy was taken from though torch would give a view. All views of the copy share it.

    Args:
        source: the carrier, which may be a copy itself. It is not kept alive.
        part: what was copied, of which the views are.
        states: the layout of that.
    """

    __slots__ = ("_behind", "_copied", "_local", "_part", "_spec", "_version")

    def __init__(self, source: ShardedTensor, part: torch.Tensor, states: States) -> None:
        self._local, self._spec, self._part = source.local, source.spec, part
        self._copied, self._behind = source.spec.space.spec(states, source.spec.shape), origin_of(source)
        self._version = version(source.local)

    def check(self, x: ShardedTensor) -> None:
        """Raises CapabilityError where the source was written to since."""
        if self._behind is not None:
            self._behind.check(x)
        if version(self._local) != self._version:
            raise CapabilityError(
                f"this tensor of shape {tuple(x.shape)} was taken as a view of one that was written to since, but its "
                "layout made it a copy: take it after the write"
            )

    def check_writing(self, x: ShardedTensor) -> None:
        """Raises CapabilityError where what is written into a view cannot be given back."""
        self.check(x)
        if not shares(x.local, self._part) or (self._local.requires_grad and torch.is_grad_enabled()):
            raise CapabilityError(
                f"this tensor of shape {tuple(x.shape)} is a copy where torch would give a view, for it needs parts of "
                "other ranks: write into the tensor that it was taken from, as x[...] = value"
            )

    def give_back(self) -> None:
        """Writes into the source what was written into the view."""
        with torch.no_grad():
            self._local.copy_(_carried(self._copied, self._part, self._spec.states))
        self._version = version(self._local)
        if self._behind is not None:
            self._behind.give_back()


def current(x: ShardedTensor) -> torch.Tensor:
    """Returns a carrier that has something aside: the joined sums, where somebody has joined them.

    Raises:
        CapabilityError: it was copied where torch would give a view, and what it was copied from was written to.
    """
    aside = x.aside
    assert aside is not None
    follow(x, aside)
    if aside.origin is not None:
        aside.origin.check(x)
    joined, now = aside.joined, version(x.local)
    if joined and joined[0] == now and usable(joined[1].local, x.local):
        return joined[1]
    is_sum = x.spec.partial and not cut_dims(x.spec.states)
    return x if not is_sum or (plainly := _kept(x, aside, _LEFT, now)) is None else plainly


def origin_of(x: Any) -> Origin | None:
    return x.aside.origin if type(x) is ShardedTensor and x.aside is not None else None


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether the two have memory in common."""
    if type(one) is ShardedTensor or type(other) is ShardedTensor:
        one, other = (x.local if type(x) is ShardedTensor else x for x in (one, other))
        return shares(one, other)
    if isinstance(one, FakeTensor):  # which has no memory
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    mine = one.untyped_storage().data_ptr()
    return mine != 0 and mine == other.untyped_storage().data_ptr()
