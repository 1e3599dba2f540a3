"""Outputs of a stack of kernels, not computed until it is known what is wanted of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist.backends.torch.sharded.nested import PLAIN
from unidist.errors import CapabilityError
from unidist.keras.torch.layers.sending import Sending

Tensor = torch.Tensor
_Tensor: Any = torch.Tensor
# By the ids of their variables.
Kernels = dict[int, Tensor]
# Calls a layer: with these kernels, on these rows.
Compute = Callable[[Kernels, Tensor], Tensor]


class Bank:
    """A stack of kernels, and the rows that they are given.

    Args:
        compute: the layer. kernels: this rank's of each stacked variable, by the id of that. rows: (rows, ...).
        may_skip: asked with the weights of a sum, (kernels, rows): whether those that are zero may be left out.
        sending: sends rows to other ranks' kernels; None: there are none beside this rank's.
        wholes: gathers all kernels then.
    """

    def __init__(
        self,
        compute: Compute,
        kernels: Kernels,
        rows: Tensor,
        may_skip: Callable[[Tensor], bool],
        sending: Sending | None = None,
        wholes: Callable[[], Kernels] | None = None,
    ) -> None:
        self.compute, self.kernels, self.rows, self.may_skip = compute, kernels, rows, may_skip
        self._sending, self._wholes = sending, wholes

    def all(self) -> Tensor:
        """Computes all kernels on all rows: (kernels, rows, ...)."""
        return self.compute(self.kernels if self._wholes is None else self._wholes(), self.rows)

    def summed(self, weights: Tensor) -> Tensor:
        """The sum over kernels of what each makes of a row, times its weight: (rows, ...)."""
        if not self.may_skip(weights):
            out = self.all()
            return (out * _over(weights, out)).sum(0)
        chosen = weights.detach() != 0
        places, counts = chosen.nonzero()[:, 1], chosen.sum(1)
        rows = self.rows.index_select(0, places)
        if self._sending is None:
            made = self._by_kernel(rows, counts)
        else:
            made = self._sending.through(self._by_kernel, rows, counts)
        made = made * _over(weights.masked_select(chosen), made)
        return made.new_zeros((len(self.rows), *made.shape[1:])).index_add(0, places, made)

    def _by_kernel(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes each of this rank's kernels on its own of these rows, which are in the order of kernels."""
        # One node of the graph for all: a slice's gradient would be a stack of zeros for each.
        each = zip(*(kernel.split(1) for kernel in self.kernels.values()), strict=True)
        # Also of no rows: each kernel has its gradient.
        parts = zip(each, rows.split(counts.tolist()), strict=True)
        return torch.cat([self.compute(dict(zip(self.kernels, own, strict=True)), part)[0] for own, part in parts])


def _over(weights: Tensor, values: Tensor) -> Tensor:
    return weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))


class Outputs(_Tensor):  # type: ignore[misc]
    """Stands for what a bank gives, (kernels, rows, ...), times weights where it was multiplied by such.

    Torch's functions see a tensor of that shape. Its product with weights of (kernels, rows) waits too, and the sum of
    that over kernels is computed of the rows alone that have a weight. Any other function is given all outputs.
    """

    bank: Bank
    weights: Tensor | None
    _all: Tensor | None

    @classmethod
    def of(cls, bank: Bank, shape: tuple[int, ...], dtype: torch.dtype, weights: Tensor | None = None) -> Outputs:
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (bank.rows, *bank.kernels.values()))
        found: Outputs = _Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=bank.rows.device, requires_grad=learns
        )
        found.bank, found.weights, found._all = bank, weights, None
        return found

    def all(self) -> Tensor:
        """All outputs, as any tensor."""
        if self._all is None:
            out = self.bank.all()
            self._all = out if self.weights is None else out * _over(self.weights, out)
        return self._all

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _SAID:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        found = None if rule is None else rule(*args, **kwargs)
        if found is not None:
            return found
        given = torch.utils._pytree.tree_map_only(Outputs, Outputs.all, (args, kwargs))
        return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CapabilityError(
            f"{func} reached the inside of outputs that are not computed: something called torch past "
            "__torch_function__; make the strategy with experts='all'"
        )


def _product(one: Any, other: Any, **more: Any) -> Outputs | None:
    """Times a weight for each kernel and row."""
    out, weights = (one, other) if type(one) is Outputs else (other, one)
    if more or out.weights is not None or type(weights) not in PLAIN or out.dtype != weights.dtype:
        return None
    if weights.ndim != out.ndim or weights.shape[:2] != out.shape[:2] or any(n != 1 for n in weights.shape[2:]):
        return None
    return Outputs.of(out.bank, tuple(out.shape), out.dtype, weights.reshape(weights.shape[:2]))


def _to(x: Any, where: Any = None, **more: Any) -> Outputs | None:
    """Leaves it where it is already, in the dtype that it has."""
    if more or not isinstance(where, (torch.dtype, torch.device, str)):
        return None
    if isinstance(where, torch.dtype):
        return x if where == x.dtype else None
    device = torch.device(where)
    return x if device.type == x.device.type and device.index in (None, x.device.index) else None


def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: Any = None) -> Tensor | None:
    """Over kernels, of what was multiplied by weights."""
    over = axis if dim is None else dim
    dims = tuple(over) if isinstance(over, (tuple, list)) else (over,)
    if x.weights is None or keepdim or dims not in ((0,), (-x.ndim,)) or dtype not in (None, x.dtype):
        return None
    out: Tensor = x.bank.summed(x.weights)
    return out


def _einsum(equation: Any, *operands: Any) -> Tensor | None:
    """The product with weights and the sum in one."""
    terms, _, result = str(equation).replace(" ", "").partition("->")
    letters = terms.split(",")
    if len(operands) != 2 or len(letters) != 2 or "." in terms:
        return None
    k = next(k for k, x in enumerate(operands) if type(x) is Outputs)
    out, weights, own, theirs = operands[k], operands[1 - k], letters[k], letters[1 - k]
    if len(set(own)) != len(own) or set(theirs) != set(own[:2]) or len(theirs) != 2 or result != own[1:]:
        return None
    weights = weights if theirs == own[:2] else weights.transpose(0, 1)
    product = _product(out, _over(weights, out)) if weights.shape == out.shape[:2] else None
    return None if product is None else product.bank.summed(weights)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.mul: _product,
    Tensor.mul: _product,
    Tensor.__mul__: _product,
    Tensor.__rmul__: _product,
    Tensor.to: _to,
    torch.sum: _sum,
    Tensor.sum: _sum,
    torch.einsum: _einsum,
}
# By name, what a tensor says of itself.
_SAID = frozenset(
    [
        *("__get__", "__set__", "__len__", "size", "dim", "ndimension", "numel", "stride"),
        *("is_floating_point", "is_complex", "is_tensor"),
    ]
)
