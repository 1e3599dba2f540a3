"""Says where Keras on torch computes, and how numbers and batches come there without a wait.

The device is that of the adapter in use, until unidist.shutdown().

Keras reads KERAS_TORCH_DEVICE when it is imported, and on a machine with GPUs takes CUDA's current one without it. What
it has found is replaced here, whichever came first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unidist.backends import registry
from unidist.keras.patching.compat import torch_core
from unidist.keras.patching.patches import Hook, Table, by

_table: Table | None = None
_wanted: str | None = None


def settle() -> None:
    """Keras computes where the adapter in use does, from here on."""
    global _table, _wanted
    wanted = registry.current().torch_device() if registry.has_current() else None
    if wanted == _wanted:
        return
    put_back()
    if wanted is not None:
        _table, _wanted = Table(_hooks(wanted)), wanted
        _table.turn_on_all_there_are()


def put_back() -> None:
    """Keras computes where it did."""
    global _table, _wanted
    if _table is not None:
        _table.turn_off()
        _table = _wanted = None


def _hooks(device: str) -> list[Hook]:
    place = Hook(torch_core, "DEFAULT_DEVICE", by(device), "Keras computes on the device of its rank")
    if torch.device(device).type == "cpu":
        return [place]
    why = "Keras's numbers come to a GPU without a wait"
    return [place, Hook(torch_core, "convert_to_tensor", _writing_numbers, why, imported=True)]


def _writing_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Writes Python's numbers on a GPU, in the dtype that Keras gives them.

    Keras copies each from the host, which waits for all that the GPU has yet to compute.
    """

    @functools.wraps(original)
    def convert_to_tensor(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.device(torch_core.get_device()).type != "cuda" or not _is_of_numbers(x):
            return original(x, *args, **kwargs)
        if not isinstance(x, (bool, int, float)):
            return torch.stack([convert_to_tensor(number, *args, **kwargs) for number in x])
        with torch_core.device_scope("cpu"):
            dtype = original(x, *args, **kwargs).dtype
        return torch.full((), x, dtype=dtype, device=torch_core.get_device())

    return convert_to_tensor


def _is_of_numbers(x: Any) -> bool:
    """Returns whether it is a number, or a few of one kind, as a shape is."""
    if isinstance(x, (tuple, list)):
        return bool(x) and len({type(number) for number in x}) == 1 and _is_of_numbers(x[0])
    return type(x) in (bool, int, float)


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a GPU, by a copy that is not waited for; as it is where there is none."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)
