"""torch's functions that know nothing of parts: transforms, and those with the user's own backward.

torch asks neither by `__torch_function__`. So they are given whole tensors: of carriers, and
of variables that are cut, as a step of the user's own sees them (seen.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unidist.backends.torch.sharded import entrances, wrap
from unidist.backends.torch.sharded.autograd import OwnGradient
from unidist.backends.torch.sharded.nested import PLAIN, space_of
from unidist.errors import CapabilityError
from unidist.keras.needs import own_code
from unidist.keras.patching.compat import CustomGradientFunction
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import carrying, context, features
from unidist.keras.torch.params import saved, seen
from unidist.keras.torch.structures import mapped

# Of torch.func: what gives a function, and, at the end, what computes at once.
_DERIVATIVES = ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "vjp", "jvp", "linearize")


def hooks() -> Iterator[Hook]:
    why = "torch's transforms know nothing of parts"
    own = functools.partial(Hook, why=why, imported=True, needed=own_code)
    yield own(torch, "vmap", functools.partial(_of_wholes, differentiates=False))
    for name in _DERIVATIVES:
        yield own("torch.func:", name, _of_wholes)
    why = "torch would find no gradient of parts"
    yield Hook(torch.autograd.Function, "apply", _applied_to_wholes, why)
    contexts = "torch.autograd.function:BackwardCFunction"
    yield Hook(contexts, "__init__", _by_ours, why, adds=True, needed=own_code)


def _applied_to_wholes(original: Any) -> Any:
    """Applies a function with a backward of the user's own, which may mix places in it, to wholes.

    torch connects what it gives with what it was given, and a part of that has no gradient itself.
    """
    of_kind = entrances.of_apply(_Marked(vars(torch.autograd.Function)["apply"])).__get__

    @functools.wraps(original)
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        called = functools.partial(of_kind(None, kind), **kwargs)
        # Of what each rank has the whole of, as a weight, the gradient is a summand.
        space = carrying.space_amid(frame) if frame is not None and _is_users(kind) else None
        if kind is CustomGradientFunction and (space := space or space_of(args)) is not None:
            return OwnGradient(args[0])(space, tuple(map(seen.whole, args[1:])))
        if space is not None:
            args = tuple(wrap(x, space.whole(x.shape)) if _has_gradient(x) else x for x in args)
        return called(*map(seen.whole, args))

    return classmethod(apply)


def _is_users(kind: Any) -> bool:
    """Inside of a transform of torch.func all is whole."""
    is_within = torch._C._are_functorch_transforms_active()
    return not is_within and not str(kind.__module__).startswith(("unidist.", "torch."))


def _has_gradient(x: Any) -> bool:
    return type(x) in PLAIN and x.requires_grad and torch.is_grad_enabled()


@calling
def _by_ours(original: Any, self: Any, *args: Any) -> None:
    """Checks each context that `apply` makes.

    Somebody may have kept an `apply` from before its replacement was there.
    """
    original(self, *args)
    is_ours, _applying.is_ours = _applying.is_ours, False
    frame = context.frame()
    if is_ours or frame is None:
        return
    if frame.carried is not None or frame.shared is not None:
        raise CapabilityError(
            "the `apply` of a torch.autograd.Function was kept from before unidist and Keras were there, so it "
            "finds no gradient of tensors that devices hold in parts. Say lambda x: MyFunction.apply(x) there, and "
            "not MyFunction.apply"
        )


class _Marked:
    """torch's own `apply`, noted as called by ours, and bound to the class of the function.

    It is a classmethod of Python's or, from torch 2.14 on, of C's.
    """

    def __init__(self, own: Any) -> None:
        self._bound = own.__get__

    def __get__(self, instance: Any, kind: Any) -> Any:
        own = self._bound(None, kind)

        def called(*args: Any, **kwargs: Any) -> Any:
            _applying.is_ours = True
            try:
                return own(*args, **kwargs)
            finally:
                _applying.is_ours = False

        return called


class _Applying(threading.local):
    is_ours = False


_applying = _Applying()


def _of_wholes(original: Any, differentiates: bool = True) -> Callable[..., Any]:
    served = _given_wholes(entrances.of_transform(original), differentiates)

    @functools.wraps(original)
    def transform(*args: Any, **kwargs: Any) -> Any:
        found = served(*args, **kwargs)
        gives_function = callable(found) and not isinstance(found, torch.Tensor)
        return _given_wholes(found, differentiates) if gives_function and context.frame() is not None else found

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
    return features.whole(seen.whole(x))
