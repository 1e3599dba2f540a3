"""Functions of torch's that know nothing of tensors in parts: transforms, and those with a backward of the user's own.

torch asks neither by `__torch_function__`. So they are given whole tensors: of RowParts and SequenceParts (parts.py),
and of variables that are cut, as a step of the user's own sees them (seen.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist.errors import CapabilityError
from unidist.keras.interception import Hook
from unidist.keras.torch import context
from unidist.keras.torch.rows.parts import Part, mapped, whole
from unidist.keras.torch.values import saved, seen
from unidist.keras.torch.values.seen import Seen

# Of torch.func: what gives a function, and what computes at once.
_TRANSFORMS = ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian")
_DERIVATIVES = ("vjp", "jvp", "linearize")


def hooks() -> Iterator[Hook]:
    why = "torch's transforms know nothing of parts"
    yield Hook(torch, "vmap", functools.partial(_of_wholes, differentiates=False), why, imported=True)
    for name in _TRANSFORMS:
        yield Hook(torch.func, name, _of_wholes, why, imported=True)
    for name in _DERIVATIVES:
        yield Hook(torch.func, name, _given_wholes, why, imported=True)
    why = "torch would find no gradient of parts"
    yield Hook(torch.autograd.Function, "apply", _applied_to_wholes, why)
    yield Hook(torch._functorch.utils, "unwrap_dead_wrappers", _without_parts, why)


def _applied_to_wholes(original: Any) -> Any:
    """A function with a backward of the user's own may mix places in it. torch connects what it gives with what it was
    given, of which a part has no gradient itself."""
    function = original.__func__

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, (Part, Seen)) for x in args):
            return function(kind, *args, **kwargs)
        args = tuple(map(seen.whole, args))
        first = next((x for x in args if isinstance(x, Part)), None)
        called = functools.partial(function, kind, **kwargs)
        return called(*args) if first is None else first.applied(called, args)

    return classmethod(functools.wraps(function)(apply))


def _without_parts(original: Any) -> Callable[..., Any]:
    """What each `apply` asks of torch: also one that somebody has kept from before its replacement was there."""

    @functools.wraps(original)
    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> Any:
        if any(isinstance(x, (Part, Seen)) for x in args):
            raise CapabilityError(
                "the `apply` of a torch.autograd.Function was kept from before unidist and Keras were there, so it "
                "finds no gradient of tensors that devices hold in parts. Say lambda x: MyFunction.apply(x) there, and "
                "not MyFunction.apply"
            )
        return original(args)

    return unwrap_dead_wrappers


def _of_wholes(original: Any, differentiates: bool = True) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform(*args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)
        return function if context.frame() is None else _given_wholes(function, differentiates)

    return transform


def _given_wholes(original: Any, differentiates: bool = True) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        if frame is None:
            return original(*args, **kwargs)
        args, kwargs = mapped(_whole, args), mapped(_whole, kwargs)
        fetcher = frame.fetcher
        if not differentiates or fetcher is None or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        with saved.without(fetcher):
            return original(*args, **kwargs)

    return function


def _whole(x: Any) -> Any:
    return whole(seen.whole(x))
