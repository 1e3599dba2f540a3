"""Carriers' methods that are called most, past torch's parsing of arguments; and operators.

Operators ask the other operand where torch does not know it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unidist.backends.torch.sharded.calls import dispatch
from unidist.backends.torch.sharded.tensor import ShardedTensor

Tensor = torch.Tensor


def _method(func: Any) -> Any:
    """One that does not go through torch's parsing of arguments, which costs as much as a plan."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return dispatch(func, args, kwargs)

    return method


# Not __getitem__: torch.tensor([x]) would take a number x for a sequence.
_METHODS = (
    "__neg__", "reshape", "view", "transpose", "permute", "unsqueeze", "contiguous", "expand", "sum",
    "mean", "backward", "detach",
)  # fmt: skip
for _name in _METHODS:
    setattr(ShardedTensor, _name, _method(getattr(Tensor, _name)))
_NUMBERS = (Tensor, int, float, complex, np.generic, np.ndarray)


def _operator(func: Any) -> Any:
    """Makes an operator of two operands.

    Where torch does not know the other, as a variable of Keras's, that one is asked, and comes again with a tensor.
    """

    def operator(one: Any, other: Any) -> Any:
        return dispatch(func, (one, other), {}) if isinstance(other, _NUMBERS) else NotImplemented

    return operator


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and or xor "
    "lt le gt ge eq ne"
)
for _name in (f"__{name}__" for name in _OPERATORS.split()):
    setattr(ShardedTensor, _name, _operator(getattr(Tensor, _name)))


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras asks at each operation: where nothing changes torch gives the tensor itself."""
    if len(args) == 1 and not kwargs:
        wanted = args[0]
        if wanted is self.dtype or (type(wanted) is str and wanted == str(self.device)):
            return self
    return dispatch(Tensor.to, (self, *args), kwargs)


ShardedTensor.to = _to
