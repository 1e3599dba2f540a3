"""Autograd's entrances. A carrier stands above autograd, so requests for gradients are served here.

All ranks are one program, and each move has its true adjoint. So the gradient of a whole value is partial: those of the
ranks add up to it. A loss that is whole begins with a part of one on each rank that holds it, one that is partial with
one; so the gradient of a carrier is right in the dual layout, and that of a plain tensor is the sum of the ranks'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist.backends.torch.sharded.binding import AUTOGRAD, DIRECT
from unidist.backends.torch.sharded.moving import carried, fanned, invariant, plain_in
from unidist.backends.torch.sharded.nested import PLAIN, replaced, space_of
from unidist.backends.torch.sharded.space import Space, Spec
from unidist.backends.torch.sharded.tensor import (
    ShardedTensor,
    aside_of,
    current,
    moved,
    plain,
    wrap,
)
from unidist.errors import CapabilityError
from unidist.propagation.layouts import PARTIAL, WHOLE

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def seed(y: ShardedTensor, gradient: Any) -> Tensor:
    """Returns the gradient that this rank's backward begins with."""
    spec = y.spec
    if gradient is not None:
        return plain(_in_dual(y, gradient))
    if y.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    alike = (axis for axis, state in enumerate(spec.states) if state == WHOLE)
    return torch.full_like(plain(y.local), spec.space.fraction(alike))


def _in_dual(x: ShardedTensor, gradient: Any, *, nested: bool = False) -> Tensor:
    """Returns a gradient in the dual layout of what it is the gradient of.

    One that is whole where a partial one is wanted is shared by all: zeros on other ranks would meet infinite
    derivatives. `nested`: a carrier inside stays.
    """
    carrier = type(gradient) is ShardedTensor
    if carrier and gradient.spec is x.spec.dual:
        held: Tensor = gradient.local
        return held
    space, dual = x.spec.space, x.spec.dual.states
    have = gradient.spec.states if carrier else (WHOLE,) * len(dual)
    shared = [axis for axis, state in enumerate(have) if state == WHOLE and dual[axis] == PARTIAL]
    part = gradient.local if carrier else gradient
    if part.dtype == torch.complex32:  # which torch does not scale
        shared = []
    if carrier and not shared:
        return moved(gradient, dual, nested=nested)
    states = tuple(PARTIAL if axis in shared else state for axis, state in enumerate(have))
    own = space.fraction(shared)
    return carried(space, part if own == 1 else part * own, states, dual)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _local(x: Any) -> Any:
    return plain(x.local) if type(x) is ShardedTensor else x


def _seeds(outputs: list[Any], gradients: Any, space: Space) -> list[Any]:
    given = [None] * len(outputs) if gradients is None else _listed(gradients)
    if space.invariant:  # of which plain tensors begin as torch's do
        return [seed(y, g) if type(y) is ShardedTensor else g for y, g in zip(outputs, given, strict=True)]
    carriers = [y if type(y) is ShardedTensor else wrap(y, space.whole(y.shape)) for y in outputs]
    return [seed(y, g) for y, g in zip(carriers, given, strict=True)]


def _backward(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Tensor.backward, and torch.autograd.backward of several."""
    if func is Tensor.backward:  # through the function, as torch does it: others may stand before that one
        said = {**dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)), **kwargs}
        torch.autograd.backward(args[0], said.pop("gradient", None), **said)
        return
    names = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    said = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    outputs = _listed(args[0] if args else said.pop("tensors"))
    gradients = said.pop(names[0], None)
    said.pop("grad_variables", None)
    if said.get("inputs") is not None:
        said["inputs"] = [_local(x) for x in _listed(said["inputs"])]
    space = space_of((outputs, gradients, args, kwargs))
    assert space is not None
    seeds = _seeds(outputs, gradients, space)
    torch.autograd.backward([_local(y) for y in outputs], seeds, **said)


def _grad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch.autograd.grad: carriers in the dual layouts of what they are the gradients of."""
    names = (
        "outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused",
        "is_grads_batched", "materialize_grads",
    )  # fmt: skip
    said = {**dict(zip(names, args, strict=False)), **kwargs}
    if said.get("is_grads_batched"):
        raise CapabilityError(
            "torch.autograd.grad with is_grads_batched=True maps over gradients, which sharded tensors are not made "
            "for: ask for one gradient after the other"
        )
    outputs, inputs = _listed(said.pop("outputs")), _listed(said.pop("inputs"))
    space = space_of((outputs, inputs, said.get("grad_outputs")))
    assert space is not None
    seeds = _seeds(outputs, said.pop("grad_outputs", None), space)
    found = torch.autograd.grad([_local(y) for y in outputs], [_local(x) for x in inputs], seeds, **said)

    def of(x: Any, gradient: Tensor) -> Tensor:
        if space.invariant and (type(x) is not ShardedTensor or x.spec.dual.whole):
            return gradient
        return wrap(gradient, (x.spec if type(x) is ShardedTensor else space.whole(x.shape)).dual)

    return tuple(None if g is None else of(x, g) for g, x in zip(found, inputs, strict=True))


def _gradient(x: ShardedTensor) -> ShardedTensor | None:
    """x.grad: one object as long as the part's gradient is one."""
    local = x.local.grad
    if local is None:
        return None
    aside = aside_of(x)
    kept = aside.gradient
    if kept is None or kept.local is not local:
        kept = aside.gradient = wrap(local, x.spec.dual)
    return kept


def _set_gradient(x: ShardedTensor, value: Any) -> None:
    x.local.grad = None if value is None else _in_dual(x, value).detach()
    if x.aside is not None:
        x.aside.gradient = value if type(value) is ShardedTensor and value.local is x.local.grad else None


def _hook(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A hook is given the gradient as a carrier, and may give another."""
    x, hook = args

    def on_part(gradient: Tensor) -> Tensor | None:
        found = hook(wrap(gradient, x.spec.dual))
        return None if found is None else _in_dual(x, found)

    return func(x.local, on_part)


def _accumulated(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, hook = args
    return func(x.local, lambda part: hook(x))


AUTOGRAD.update(backward=_backward, grad=_grad)
DIRECT[Tensor.backward] = _backward
DIRECT[Tensor.register_hook] = _hook
DIRECT[Tensor.register_post_accumulate_grad_hook] = _accumulated
ShardedTensor.gradient_of = staticmethod(_gradient)
ShardedTensor.set_gradient = staticmethod(_set_gradient)


# Code that sees no other ranks: it is given wholes, and gradients that are whole. -----------------------------------


def as_carriers(value: Any, space: Space, change: Callable[[Tensor], Tensor]) -> Any:
    def wrapped(x: Tensor) -> Tensor:
        return x if type(x) is ShardedTensor or space.invariant else wrap(change(x), space.whole(x.shape))

    return replaced(value, Tensor, wrapped)


def applied(apply: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Applies a user's autograd.Function on wholes.

    Its backward is its own: it need not be linear, so it sees the gradient of all ranks together. Each rank takes its
    share of what it gives.
    """
    space = space_of((args, kwargs))
    assert space is not None
    is_plain = space.invariant
    given = replaced((args, kwargs), ShardedTensor, lambda x: x.whole() if is_plain else invariant(space, x.whole()))
    out = apply(*given[0], **given[1])
    return as_carriers(out, space, lambda x: fanned(space, x) if x.requires_grad else x)


class OwnGradient:
    """A function with a gradient of its own making: both go by rules, as both are torch's operations.

    Args:
        function: gives a value, and a function that makes the gradients of the arguments, of these and of `upstream`,
            that of the value. It need not be linear: a sum's parts are joined where a rule wants that.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._specs: list[Spec | None] = []

    def __call__(self, space: Space, args: Args) -> Tensor:
        given = [current(x) if type(x) is ShardedTensor and x.aside is not None else x for x in args]
        self._leaves = [space.invariant and type(x) in PLAIN and x.is_leaf for x in given]
        given = [_entered(space, x, leaf) for x, leaf in zip(given, self._leaves, strict=True)]
        self._specs = [x.spec if type(x) is ShardedTensor else None for x in given]
        parts = [x.local if type(x) is ShardedTensor else x for x in given]
        inner = space_of(parts)
        if inner is None:
            local: Tensor = _ByRules.apply(self, *parts)  # type: ignore[no-untyped-call]
        else:
            local = OwnGradient(self._on_parts)(inner, tuple(parts))
        return local if self._is_plain else wrap(local, self._out)

    def _on_parts(self, *parts: Any) -> tuple[Tensor, Callable[..., Any]]:
        return self.forward(parts), lambda *given, upstream: self.backward(given, upstream)

    def _carriers(self, parts: Args) -> list[Any]:
        return [x if spec is None else wrap(x, spec) for x, spec in zip(parts, self._specs, strict=True)]

    def forward(self, parts: Args) -> Tensor:
        out, self._gradients = self._function(*self._carriers(parts))
        if type(out) is not ShardedTensor:
            space = next(spec for spec in self._specs if spec is not None).space
            out = wrap(out, space.whole(out.shape))
        self._out: Spec = out.spec
        # Its gradient then comes whole to every rank.
        self._is_plain = self._out.whole and self._out.space.invariant
        return out.local

    def backward(self, parts: Args, gradient: Tensor) -> tuple[Any, ...]:
        given = self._carriers(parts)
        found = self._gradients(*given, upstream=wrap(gradient, self._out if self._is_plain else self._out.dual))
        found = found if isinstance(found, tuple) else (found,)
        return tuple(
            None if g is None or type(x) is not ShardedTensor else _whole(g) if leaf else _in_dual(x, g, nested=True)
            for x, g, leaf in zip(given, found, self._leaves, strict=True)
        )


def _entered(space: Space, x: Any, leaf: bool) -> Any:
    """Carries what each rank has all of: a plain tensor, or a carrier of a space inside of this."""
    is_carrier = type(x) is ShardedTensor
    if (is_carrier and x.spec.space is space) or not (is_carrier or type(x) in PLAIN):
        return x
    whole = space.whole(x.shape)
    return wrap(x if leaf else plain_in(space, x, whole.states), whole)


def _whole(gradient: Tensor) -> Tensor:
    """Returns the gradient of what every rank holds alike: most often it is whole, as a next value is."""
    if type(gradient) is not ShardedTensor:
        return gradient
    return moved(gradient, gradient.spec.space.whole(gradient.shape).states)


class _ByRules(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: OwnGradient, *parts: Any) -> Tensor:
        ctx.own = own
        ctx.save_for_backward(*parts)
        return own.forward(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.own.backward(ctx.saved_tensors, gradient)


def on_wholes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A transform of torch.func, which makes tensors of its own kinds: given carriers it runs on wholes."""

    def served(*args: Any, **kwargs: Any) -> Any:
        space = space_of((args, kwargs))
        if space is None:
            out = function(*args, **kwargs)
            return on_wholes(out) if callable(out) and not isinstance(out, Tensor) else out
        given = replaced((args, kwargs), ShardedTensor, ShardedTensor.whole)
        found = function(*given[0], **given[1])
        out = as_carriers(found, space, lambda x: x)
        if isinstance(out, tuple):  # vjp and linearize give functions too
            return tuple(on_wholes(one) if callable(one) and not isinstance(one, Tensor) else one for one in out)
        return out

    return served
