"""Stored shards in the dtype of computation: gathers 16 bits where layers read 16 bits.

So it is under a mixed policy, and 16 bits are there while a layer computes. Gradients are summed in the dtype of the
weights, as on one device.

Source of the method: `param_dtype` of PyTorch FSDP's mixed precision (Zhao et al., arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unidist.keras.patching.compat import get_autocast_scope, to_torch_dtype

if TYPE_CHECKING:
    from unidist.keras.torch.params.param_group import Unit


def expected(layer: Any, variable: Any) -> torch.dtype | None:
    """Returns the dtype in which a layer will read its variable, where that has fewer bits than its own.

    An expectation: whatever reads it in another way gets it as it is stored. A regularizer always does.
    """
    if not layer.autocast or not variable._autocast or variable.regularizer is not None:
        return None
    own, computed = to_torch_dtype(variable._dtype), to_torch_dtype(layer.compute_dtype)
    both_float = own.is_floating_point and computed.is_floating_point
    return computed if both_float and computed.itemsize < own.itemsize else None


def read_now(variable: Any) -> torch.dtype | None:
    """The dtype in which a variable is read at the moment; None: in its own."""
    scope = get_autocast_scope() if variable._autocast else None
    return None if scope is None or scope.dtype is None else to_torch_dtype(scope.dtype)


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


@dataclass(frozen=True, slots=True)
class LowValue:
    """A variable's gathered value in another dtype than its own, on one rank.

    Attributes:
        unit: gathers it. place: its place there.
        leaf: where its gradient arrives. It has no memory for this.
    """

    unit: Unit
    place: int
    leaf: torch.nn.Parameter

    @property
    def value(self) -> torch.Tensor:
        return self.unit.values[self.place]

    def read(self) -> torch.Tensor:
        """Returns what a layer computes with; fetched from the other data ranks if need be."""
        self.unit.need(self.unit.storages[self.place])
        return _Read.apply(self.leaf, self.value)  # type: ignore[no-any-return,no-untyped-call]


class _Read(torch.autograd.Function):
    """A leaf in another dtype, which is there already. The adjoint is a cast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None
