"""Functions of each element alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unidist.backends.torch.sharded.binding import Binding, Bound, Call, Composed, Local, bind, binds
from unidist.backends.torch.sharded.moving import fanned, invariant
from unidist.backends.torch.sharded.tensor import wrap
from unidist.propagation.choosing import Decision
from unidist.propagation.layouts import WHOLE
from unidist.propagation.rules.elementwise import Linear, elementwise, selected

Tensor = torch.Tensor
NUMBERS = (int, float, bool, complex)
ONE = (
    "neg negative clone contiguous detach positive __neg__ __pos__ conj resolve_conj resolve_neg alias_copy real imag "
    "to_dense"
)
# What is linear in no operand, or whose linearity is of no use.
NO = """
    pow square sqrt rsqrt exp exp2 expm1 log log1p log2 log10 abs absolute sign sgn signbit ceil floor round trunc fix
    frac sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh sinc
    sigmoid relu relu6 gelu silu elu selu celu leaky_relu hardtanh hardswish hardsigmoid hardshrink softshrink mish
    softplus softsign logsigmoid tanhshrink threshold reciprocal erf erfc erfinv lgamma digamma polygamma i0 i0e i1 i1e
    ndtr ndtri log_ndtr entr expit logit multigammaln gammaln psi gammaincc gammainc xlog1py zeta
    minimum maximum clamp clip clamp_min clamp_max lt le gt ge eq ne less less_equal greater greater_equal
    not_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __invert__ __rand__ __ror__ __rxor__ __lshift__
    __rshift__ __pow__ __rpow__ __rdiv__ __rtruediv__ floor_divide __floordiv__ __rfloordiv__ remainder fmod __mod__
    __rmod__ atan2 arctan2 isnan isinf isfinite isposinf isneginf isreal nan_to_num lerp addcmul addcdiv xlogy hypot
    fmax fmin __eq__ __ne__ __lt__ __le__ __gt__ __ge__ heaviside isclose copysign float_power gcd lcm ldexp logaddexp
    logaddexp2 nextafter rad2deg deg2rad masked_fill angle polar complex __abs__ frexp
"""


def _elementwise(linear: Linear) -> Binding:
    def binding(call: Call) -> Bound:
        lean = _lean(call)
        return Bound(partial(elementwise, linear=linear, lean=lean), gathers_little=bool(lean))

    return binding


def _lean(call: Call) -> int:
    """Returns the times its elements from which on a mask is made whole before it is spread; 0: it is not."""
    if not call.space.lean or any(isinstance(x, Tensor) and x.is_floating_point() for x in call.args):
        return 0
    return max(call.space.sizes)


bind(ONE, _elementwise("one"))
bind(NO, _elementwise("no"))
bind("real imag", _elementwise("one"), (Tensor,))


@binds("add sub subtract __add__ __radd__ __sub__ __rsub__ rsub add_ sub_ subtract_ __iadd__ __isub__")
def _sum(call: Call) -> Bound:
    """Binds sums: of a sum's parts all numbers and whole summands count once."""
    if len(call.args) != 2:
        return Bound(partial(elementwise, linear="no"))
    if all(isinstance(value, Tensor) for value in call.args):
        return Bound(partial(elementwise, linear="sum"))
    numbers = all(isinstance(value, (Tensor, *NUMBERS)) for value in call.args)
    return Bound(
        partial(elementwise, linear="sum" if numbers else "no"), local=_once(call) if numbers else None, nests=numbers
    )


def _once(call: Call) -> Callable[[Decision], Local]:
    """The call on parts; of a sum numbers count once."""

    def local(decision: Decision) -> Local:
        func, once = call.func, call.space.first(decision.out)

        def run(parts: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            left = iter(parts)
            given = [next(left) if isinstance(v, Tensor) else v if once else type(v)(0) for v in args]
            return func(*given, **kwargs)

        return run

    return local


@binds("where")
def _where(call: Call) -> Bound | None:
    if len(call.args) < 2:
        return None  # the places of what is true: their number is data
    plain = len(call.args) == 3 and all(isinstance(value, (Tensor, *NUMBERS)) for value in call.args)
    if call.func is not torch.where or not plain or not isinstance(call.args[0], Tensor):
        return Bound(partial(elementwise, linear="no"))
    return Bound(selected, local=_once(call), nests=True)


@binds("mul multiply __mul__ __rmul__ mul_ multiply_ __imul__")
def _product(call: Call) -> Bound:
    """Binds products: infinity times a part that is 0 is no part of the product."""
    finite = all(value - value == 0 for value in call.args if isinstance(value, NUMBERS))
    return Bound(partial(elementwise, linear="product" if finite else "no"))


@binds("div divide true_divide __truediv__ div_ divide_ true_divide_ __itruediv__")
def _quotient(call: Call) -> Bound:
    rounds = call.kwargs.get("rounding_mode") is not None or not isinstance(call.args[0], Tensor)
    by_zero = any(value == 0 for value in call.args[1:] if isinstance(value, NUMBERS))
    return Bound(partial(elementwise, linear="no" if rounds or by_zero else "first"))


bind(
    "clamp_ clip_ clamp_min_ clamp_max_ copy_ fill_ zero_ exp_ log_ sqrt_ rsqrt_ abs_ neg_ relu_ tanh_ sigmoid_ "
    "masked_fill_ pow_ square_ reciprocal_ floor_ ceil_ round_ sign_ __ipow__ lerp_ addcmul_ addcdiv_ "
    "logical_and_ logical_or_ logical_not_ __iand__ __ior__ leaky_relu_ elu_ hardtanh_",
    _elementwise("no"),
)


@binds("to float double half bfloat16 long int short char byte bool cfloat cdouble type_as cpu cuda type", (Tensor,))
def _to(call: Call) -> Bound | Composed | None:
    """A sum is cast by its parts only where nothing is rounded."""
    x, rest = call.args[0], call.args[1:]
    if any(isinstance(value, Tensor) for value in (*rest, *call.kwargs.values())):
        return Composed(_like_another)
    if call.func is Tensor.type and not rest and not call.kwargs:
        return None
    named = {name: value for name, value in call.kwargs.items() if name != "memory_format"}
    to = call.func(torch.empty(0, dtype=x.dtype, device=x.device), *rest, **named).dtype
    if not _holds(to, x.dtype):
        return Bound(partial(elementwise, linear="no"))
    return Bound(partial(elementwise, linear="one")) if _holds(x.dtype, to) else Composed(partial(_widened, call.func))


def _widened(func: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
    """Casts to more bits.

    Backward rounds: of a whole, the gradients of all ranks together, as one device does.
    """
    space, states = x.spec.space, x.spec.states
    whole = tuple(axis for axis, state in enumerate(states) if state == WHOLE)
    if not whole or not x.requires_grad or not torch.is_grad_enabled():
        return wrap(func(x.local, *rest, **kwargs), x.spec)
    return wrap(fanned(space, func(invariant(space, x.local, whole), *rest, **kwargs), whole), x.spec)


def _like_another(x: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
    return x.to(other.device, other.dtype, *rest, **kwargs)


def _holds(to: torch.dtype, of: torch.dtype) -> bool:
    """Returns whether a sum of casts is the cast of the sum, but for what a float's additions round."""
    if to == of:
        return True
    if to.is_complex or of.is_complex:
        return to.is_complex
    both = to.is_floating_point and of.is_floating_point
    return both and torch.finfo(to).eps <= torch.finfo(of).eps and torch.finfo(to).max >= torch.finfo(of).max


LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"


@binds(LOSSES, (torch.nn.functional,))
def _loss(call: Call) -> Bound | Composed | None:
    """A mean over all elements is the mean of what each element gives."""
    if any(call.kwargs.get(old) is not None for old in ("size_average", "reduce")) or len(call.args) > 2:
        return None
    how = call.kwargs.get("reduction", "mean")
    if how == "none":
        return Bound(partial(elementwise, linear="no"))
    return Composed(partial(_reduced, call.func, how)) if how in ("mean", "sum") else None


def _reduced(func: Any, how: str, *args: Any, **kwargs: Any) -> Any:
    each = func(*args, **{**kwargs, "reduction": "none"})
    return each.mean() if how == "mean" else each.sum()
