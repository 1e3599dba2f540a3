"""Where Keras on torch computes, and how numbers and batches come there without a wait.

The device is that of the adapter in use, until unidist.shutdown().

Keras reads KERAS_TORCH_DEVICE when it is imported, and on a machine with GPUs takes CUDA's current one without it. What
it has found is replaced here, whichever came first.
"""

from __future__ import annotations

import torch

from unidist.backends import registry
from unidist.keras.compat import torch_core
from unidist.keras.interception import Hook, Table, by

_table: Table | None = None


def settle() -> None:
    """Keras computes where the adapter in use does, from here on."""
    global _table
    put_back()
    wanted = registry.current().torch_device() if registry.has_current() else None
    if wanted is not None and wanted != torch_core.DEFAULT_DEVICE:
        _table = Table([Hook(torch_core, "DEFAULT_DEVICE", by(wanted), "Keras computes on the device of its rank")])
        _table.turn_on()


def put_back() -> None:
    """Keras computes where it did."""
    global _table
    if _table is not None:
        _table.turn_off()
        _table = None


def filled(number: float, like: torch.Tensor) -> torch.Tensor:
    """A number where a tensor is, in its dtype. It is written there: to copy it from the host would wait for all that
    the device has yet to compute."""
    return torch.full((), float(number), dtype=like.dtype, device=like.device)


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a GPU, by a copy that is not waited for; as it is where there is none."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)
