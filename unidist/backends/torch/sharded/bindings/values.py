"""Binds what a tensor says of itself, and what is made like it: no layout changes."""

from __future__ import annotations

import copy
from functools import partial
from math import prod
from typing import Any

import torch

from unidist.backends.torch.sharded.binding import DIRECT, Bound, Call, bind, directly
from unidist.backends.torch.sharded.tensor import ShardedTensor, as_whole, wrap
from unidist.errors import CapabilityError
from unidist.propagation.rules.views import like

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _of_part(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Asks the part, whose answer is true of the whole."""
    return func(*(x.local if type(x) is ShardedTensor else x for x in args), **kwargs)


def _size(func: Any, args: Args, kwargs: Kwargs) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return args[0].shape if dim is None else args[0].shape[dim]


def _length(func: Any, args: Args, kwargs: Kwargs) -> int:
    if not args[0].shape:
        raise TypeError("len() of a 0-d tensor")
    return int(args[0].shape[0])


def _stride(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """As if the whole lay in memory in the order of the part."""
    x = args[0]
    order = sorted(range(len(x.shape)), key=lambda dim: (-x.local.stride(dim), dim))
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step if x.local.stride(dim) or x.shape[dim] != x.local.shape[dim] else 0
        step *= max(x.shape[dim], 1) if strides[dim] else 1
    asked = args[1] if len(args) > 1 else kwargs.get("dim")
    return tuple(strides) if asked is None else strides[asked]


def _new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Makes a tensor of its dtype and device, and the same on every rank."""
    x, given = args[0], [v.whole() if type(v) is ShardedTensor else v for v in args[1:]]
    out = func(x.local, *given, **kwargs)
    return as_whole(x.spec.space, out)


def _requires_grad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    func(args[0].local, *args[1:], **kwargs)
    return args[0]


def _copied(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    out = wrap(copy.deepcopy(x.local, args[1] if len(args) > 1 else {}), x.spec)
    if x.local.grad is not None:
        out.local.grad = x.local.grad.clone()
    return out


def _data(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Torch counts no writes into its own `data`; what is remembered of a carrier has to know of them."""
    return wrap(args[0].local.detach(), args[0].spec)


def _set_data(func: Any, args: Args, kwargs: Kwargs) -> None:
    x, value = args
    if type(x) is not ShardedTensor or type(value) is not ShardedTensor or x.spec is not value.spec:
        raise CapabilityError("x.data = y needs two sharded tensors of one layout: write x.copy_(y) under no_grad")
    x.local.data = value.local
    x.aside = None


def _numpy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A copy where it was gathered: nobody shall write into what others are given again."""
    x = args[0]
    whole = x.whole()
    return func(whole if whole is x.local else whole.clone() if not whole.requires_grad else whole, *args[1:], **kwargs)


directly("size", _size)
directly("dim ndimension", lambda f, a, k: len(a[0].shape))
directly("numel nelement", lambda f, a, k: prod(a[0].shape))
directly("__len__", _length)
directly("stride", _stride)
directly("numpy __array__ __dlpack__", _numpy)
directly("new_zeros new_ones new_empty new_full new_tensor new new_empty_strided", _new)
directly("requires_grad_ detach_ retain_grad share_memory_", _requires_grad)
directly("__deepcopy__", _copied)
directly(
    "is_floating_point is_complex is_signed element_size get_device is_contiguous storage_offset is_inference is_conj "
    "is_neg result_type promote_types has_names is_distributed is_pinned",
    _of_part,
)
_PROPERTIES = (
    "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "itemsize", "layout", "is_mps",
    "is_xla", "is_mkldnn", "names",
)  # fmt: skip
for _name in _PROPERTIES:
    _property = getattr(Tensor, _name, None)
    if _property is not None and hasattr(_property, "__get__"):
        DIRECT[_property.__get__] = _of_part
for _name, _read in (
    ("shape", lambda x: x.shape),
    ("dtype", lambda x: x.dtype),
    ("device", lambda x: x.device),
    ("ndim", lambda x: len(x.shape)),
    ("nbytes", lambda x: prod(x.shape) * x.dtype.itemsize),
):
    DIRECT[getattr(Tensor, _name).__get__] = partial(lambda read, f, a, k: read(a[0]), _read)
_values: Any = Tensor.data
DIRECT[_values.__get__] = _data
DIRECT[_values.__set__] = _set_data
DIRECT[Tensor.__iter__] = lambda f, a, k: iter(torch.unbind(a[0], 0))


def _created(call: Call) -> Bound | None:
    tensors = sum(isinstance(v, Tensor) for v in (*call.args, *call.kwargs.values()))
    return Bound(like) if tensors == 1 else None


bind("zeros_like ones_like full_like empty_like", _created, (torch,))
