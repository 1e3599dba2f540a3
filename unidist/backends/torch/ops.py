"""TorchOps: what a rank does with its own tensor, and the bridge to torch's autograd."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unidist.algebra.layout import ReduceOp
from unidist.backends.protocol import Array, plain_array
from unidist.errors import CapabilityError

Move = Callable[[torch.Tensor], torch.Tensor]


class TorchOps:
    """LocalOps over torch tensors.

    Args:
        device: where arrays that are not tensors yet are put; tensors stay where they are.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def from_numpy(self, value: Any) -> torch.Tensor:
        """The tensor of a NumPy array or a Python value, copied; a tensor is kept, with its gradient."""
        if isinstance(value, torch.Tensor):
            return value
        array = plain_array(value)
        if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not read
            bits = torch.tensor(array.view(np.int16), device=self.device)
            return bits.view(torch.bfloat16)
        return torch.tensor(array, device=self.device)

    def to_numpy(self, x: torch.Tensor) -> Array:
        """Returns a copy as a NumPy array.

        bfloat16 keeps its type where ml_dtypes is installed (Keras brings it). Otherwise it widens to float32, which
        holds every bfloat16 exactly.
        """
        values = x.detach().cpu()
        if values.dtype != torch.bfloat16:
            return np.array(values.numpy())
        if importlib.util.find_spec("ml_dtypes") is None:
            return np.array(values.float().numpy())
        import ml_dtypes

        bits = values.contiguous().view(torch.int16).numpy()
        return np.array(bits.view(ml_dtypes.bfloat16))

    def cut(self, x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        if length == x.shape[dim]:
            return x
        # A view would keep the whole tensor's memory alive and would see later writes to it.
        return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)

    def embed(self, x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] = length
        out = x.new_zeros(shape)
        out.narrow(dim, start, x.shape[dim]).copy_(x)
        return out

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x * factor in the dtype of x.

        Raises:
            CapabilityError: a fraction of an integer or bool tensor (P(mean)), which its dtype cannot hold.
        """
        if x.is_floating_point():
            return x * factor
        if factor != int(factor):
            raise CapabilityError(
                f"a mean over ranks scales by {factor}, which {x.dtype} cannot hold: cast to a floating dtype first"
            )
        return (x * int(factor)).to(x.dtype)

    def full_like(self, x: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return torch.full_like(x, op == "prod", memory_format=torch.contiguous_format)

    def differentiable(self, forward: Move, backward: Move, x: torch.Tensor) -> torch.Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return forward(x)
        out: torch.Tensor = _Linear.apply(forward, backward, x)  # type: ignore[no-untyped-call]
        return out


class _Linear(torch.autograd.Function):
    """A linear move with its adjoint. The adjoint of the adjoint is the move, for higher gradients."""

    @staticmethod
    def forward(ctx: Any, forward: Move, backward: Move, x: torch.Tensor) -> torch.Tensor:
        ctx.moves = forward, backward
        return forward(x)  # where this is x itself, torch makes it a view and refuses to write to it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        forward, backward = ctx.moves
        if grad.requires_grad and torch.is_grad_enabled():
            return None, None, _Linear.apply(backward, forward, grad)  # type: ignore[no-untyped-call]
        return None, None, backward(grad)
