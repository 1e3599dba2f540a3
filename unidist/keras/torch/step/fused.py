"""Updates as Adam and as SGD with momentum by torch's fused kernels, which go over memory once.

Keras's go over it ten times and three times.

The numbers are Keras's up to rounding. Adam's step size holds Keras's bias corrections already, so torch's own are
turned off, by a count of steps that is infinite. Keras's momentum holds steps and torch's gradients: a step down its
own sum, at a rate of minus one, of gradients that are turned round and damped to the learning rate, is Keras's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist.keras.patching.compat import TorchAdam, TorchSGD, ops
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params import placing

# In lower precision Keras rounds after every operation, and torch after the last. CUDA's kernel reads the step size as
# a float32.
_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}

Pair = tuple[Any, Any]
# Updates the variables in the first column, with gradients in the second and slots in the others.
Kernel = Callable[[Any, list[list[torch.Tensor]], Any], None]


def takes(optimizer: Any) -> bool:
    """Returns whether a kernel makes an optimizer's update.

    It does for Keras's Adam or AdamW, and for its SGD with momentum.
    """
    return _kernel(optimizer) is not None


def _kernel(optimizer: Any) -> Kernel | None:
    update = getattr(type(optimizer), "_parallel_update_step", None)
    if update is TorchAdam._parallel_update_step:
        return _adam
    if update is TorchSGD._parallel_update_step and optimizer.momentum and not optimizer.nesterov:
        return _sgd
    return None


def update(optimizer: Any, frame: Frame, pairs: list[Pair], learning_rate: Any) -> list[Pair]:
    """Updates variables and slots by (gradient, variable); returns those that the kernel cannot take."""
    kernel = _kernel(optimizer)
    if kernel is None:
        return pairs
    left: list[Pair] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for grad, variable in pairs:
        own, *slots = [_own(frame, v) for v in (variable, *_slots(optimizer, variable))]
        tensors = [own, grad, *slots]
        if _fits(tensors):
            kinds.setdefault((grad.dtype, grad.device), []).append(tensors)
        else:
            left.append((grad, variable))
    with torch.no_grad():
        for members in kinds.values():
            kernel(optimizer, [list(column) for column in zip(*members, strict=True)], learning_rate)
    return left


def _adam(optimizer: Any, columns: list[list[torch.Tensor]], learning_rate: Any) -> None:
    values, grads, momentums, velocities, *highest = columns
    endless = torch.full((), float("inf"), device=values[0].device)
    torch._fused_adam_(
        values,
        grads,
        momentums,
        velocities,
        highest[0] if highest else [],
        [endless] * len(values),
        lr=_step_size(optimizer, learning_rate, values[0].dtype),
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        weight_decay=0.0,  # Keras's is applied already
        eps=optimizer.epsilon,
        amsgrad=optimizer.amsgrad,
        maximize=False,
    )


def _sgd(optimizer: Any, columns: list[list[torch.Tensor]], learning_rate: Any) -> None:
    values, grads, momentums = columns
    torch._fused_sgd_(
        values,
        grads,
        momentums,
        weight_decay=0.0,  # Keras's is applied already
        momentum=optimizer.momentum,
        lr=-1.0,
        dampening=1.0 - float(learning_rate),
        nesterov=False,
        maximize=True,
        is_first_step=False,
    )


def _own(frame: Frame, variable: Any) -> torch.Tensor:
    """Returns what `variable.value` is in an optimizer, found at once."""
    return variable._storage.own(frame) if placing.is_placed(variable) else variable.value  # type: ignore[no-any-return]


def _slots(optimizer: Any, variable: Any) -> list[Any]:
    k = optimizer._get_variable_index(variable)
    if isinstance(optimizer, TorchSGD):
        return [optimizer.momentums[k]]
    slots = [optimizer._momentums[k], optimizer._velocities[k]]
    if optimizer.amsgrad:
        slots.append(optimizer._velocity_hats[k])
    return slots


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Returns whether the kernel takes them. It does not look at strides: it would write elsewhere."""
    first = tensors[0]
    dtype, device = first.dtype, first.device
    takes = dtype in _DTYPES.get(device.type, ()) and first.numel() > 0
    for t in tensors:
        takes = takes and t.dtype == dtype and t.device == device and t.is_contiguous()
    return takes


def _step_size(optimizer: Any, learning_rate: Any, dtype: torch.dtype) -> torch.Tensor:
    """As Keras computes it, in the variables' precision."""
    rate, step = (ops.cast(x, str(dtype).removeprefix("torch.")) for x in (learning_rate, optimizer.iterations + 1))
    size: torch.Tensor = rate * torch.sqrt(1 - optimizer.beta_2**step) / (1 - optimizer.beta_1**step)
    return size
