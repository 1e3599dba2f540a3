"""Which functions of torch treat each element alone, by name; which say something of the shape, or write.

An entry is a function of torch, and the condition on its arguments under which it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# What a function is given beside tensors, the same for a part and the whole.
CONSTANTS = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
Condition = Callable[[int, Sequence[Any], dict[str, Any]], bool]

# Each element alone, and what it is broadcast with.
_EACH = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "neg", "negative", "abs"),
    *("absolute", "sqrt", "rsqrt", "square", "reciprocal", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin"),
    *("cos", "tan", "tanh", "sigmoid", "erf", "erfc", "sign", "floor", "ceil", "round", "trunc", "maximum", "minimum"),
    *("clamp", "clip", "clamp_min", "clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "logical_and"),
    *("logical_or", "logical_not", "logical_xor", "isnan", "isinf", "isfinite", "nan_to_num", "lerp", "addcmul"),
    *("addcdiv", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
    *("softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink", "hardtanh", "hardsigmoid", "hardswish"),
    *("not_equal", "less", "less_equal", "greater", "greater_equal", "log10", "logaddexp", "logaddexp2", "hypot"),
    *("remainder", "fmod", "floor_divide", "fmin", "fmax", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh"),
    *("atanh", "arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh", "atan2", "arctan2", "signbit"),
    *("heaviside", "copysign", "xlogy", "deg2rad", "rad2deg", "isposinf", "isneginf", "isclose", "lgamma"),
    *("digamma", "erfinv", "logit", "sinc", "i0", "frac", "positive", "float_power", "nextafter"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("__and__", "__or__", "__xor__", "__invert__", "__mod__", "__floordiv__"),
    *("threshold", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__neg__", "__abs__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)
# Each element alone, of one tensor: another one would say what kind is wanted, and is not broadcast with.
_ALONE = (
    *("to", "type", "float", "half", "bfloat16", "double", "bool", "int", "long", "clone", "contiguous", "detach"),
    *("zeros_like", "ones_like", "full_like", "empty_like"),
)
_PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "itemsize", "nbytes", "_version"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("is_signed", "get_device", "__len__", "__hash__"),
)
_IN_PLACE = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset(["__setitem__", "__set__", "register_hook", "retain_grad", *(f"__i{name}__" for name in _IN_PLACE)])


def named(names: Iterable[str]) -> Iterable[Any]:
    """The functions of these names: of torch, as methods, and of torch.nn.functional."""
    for name in names:
        # Every module has an __eq__ of its own.
        for home in (torch.Tensor,) if name.startswith("__") else (torch, torch.Tensor, torch.nn.functional):
            found = getattr(home, name, None)
            # torch.float is a dtype.
            if callable(found):
                yield found


def _each(ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("out") is None and not kwargs.get("inplace")


def _alone(ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return sum(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())) == 1


def _where(ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    # Of a condition alone it gives places.
    return len(args) + len(kwargs) == 3 and _each(ndim, args, kwargs)


def each() -> dict[Any, Condition]:
    """function -> the condition under which it treats each element alone."""
    return {**dict.fromkeys(named(_EACH), _each), **dict.fromkeys(named(_ALONE), _alone), torch.where: _where}


def each_in_place() -> frozenset[Any]:
    """Functions that write into each element of their first argument what they compute of it alone."""
    names = [name for name in _EACH if not name.startswith("__")]
    operators = [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow")]
    return frozenset(named([*(f"{name}_" for name in names), *operators, "copy_", "zero_", "fill_"]))


OF_THE_SHAPE = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *named(_METHODS),
    ]
)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
OF_THE_GRAPH = frozenset(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf"))


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it changes its first argument, or what is known of it."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__")
    return name in _WRITES or func == _DATA or in_place or bool(kwargs.get("inplace"))
