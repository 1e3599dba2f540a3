"""Adam's update as torch's fused kernel: memory is read and written once, where Keras's update goes over it ten times.

The numbers are Keras's up to rounding. The step size holds Keras's bias corrections already, so torch's own are turned
off, by a count of steps that is infinite.
"""

from __future__ import annotations

from typing import Any

import torch

from unidist.keras.compat import TorchAdam as Adam
from unidist.keras.compat import ops
from unidist.keras.explicit import placing
from unidist.keras.explicit.context import Frame

# In lower precision Keras rounds after every operation, and torch after the last. CUDA's kernel reads the step size as
# a float32.
_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}

Pair = tuple[Any, Any]


def takes(optimizer: Any) -> bool:
    """Whether an optimizer's update is that of Keras's Adam; AdamW's is."""
    return getattr(type(optimizer), "_parallel_update_step", None) is Adam._parallel_update_step


def update(optimizer: Any, frame: Frame, pairs: list[Pair], learning_rate: Any) -> list[Pair]:
    """Updates variables and their slots by (gradient, variable); gives back those that the kernel cannot take."""
    left: list[Pair] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for grad, variable in pairs:
        own, *slots = [_own(frame, v) for v in (variable, *_slots(optimizer, variable))]
        tensors = [own, grad, *slots]
        if _fits(tensors):
            kinds.setdefault((grad.dtype, grad.device), []).append(tensors)
        else:
            left.append((grad, variable))
    for (dtype, device), members in kinds.items():
        values, grads, momentums, velocities, *highest = (list(column) for column in zip(*members, strict=True))
        endless = torch.full((), float("inf"), device=device)
        with torch.no_grad():
            torch._fused_adam_(
                values,
                grads,
                momentums,
                velocities,
                highest[0] if highest else [],
                [endless] * len(values),
                lr=_step_size(optimizer, learning_rate, dtype),
                beta1=optimizer.beta_1,
                beta2=optimizer.beta_2,
                weight_decay=0.0,  # Keras's is applied already
                eps=optimizer.epsilon,
                amsgrad=optimizer.amsgrad,
                maximize=False,
            )
    return left


def _own(frame: Frame, variable: Any) -> torch.Tensor:
    """What `variable.value` is in an optimizer, found at once."""
    return variable._storage.own(frame) if placing.is_placed(variable) else variable.value  # type: ignore[no-any-return]


def _slots(optimizer: Any, variable: Any) -> list[Any]:
    k = optimizer._get_variable_index(variable)
    slots = [optimizer._momentums[k], optimizer._velocities[k]]
    if optimizer.amsgrad:
        slots.append(optimizer._velocity_hats[k])
    return slots


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Whether the kernel takes them. It does not look at strides: it would write elsewhere."""
    first = tensors[0]
    return (
        first.dtype in _DTYPES.get(first.device.type, ())
        and first.numel() > 0
        and all(t.is_contiguous() and t.dtype == first.dtype and t.device == first.device for t in tensors)
    )


def _step_size(optimizer: Any, learning_rate: Any, dtype: torch.dtype) -> torch.Tensor:
    """As Keras computes it, in the variables' precision."""
    rate, step = (ops.cast(x, str(dtype).removeprefix("torch.")) for x in (learning_rate, optimizer.iterations + 1))
    size: torch.Tensor = rate * torch.sqrt(1 - optimizer.beta_2**step) / (1 - optimizer.beta_1**step)
    return size
