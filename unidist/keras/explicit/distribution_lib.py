"""What Keras's distribution API asks of a backend, for torch: the module that keras.distribution calls."""

from __future__ import annotations

from typing import Any

import torch

from unidist import array, session
from unidist.array import DistributedArray, as_layout, as_mesh
from unidist.keras.explicit import context


def list_devices(device_type: str | None = None) -> list[str]:
    return session.list_devices(device_type.lower() if device_type else None)


def get_device_count(device_type: str | None = None) -> int:
    return len(list_devices(device_type))


def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    address = job_addresses.split(",")[0] if job_addresses else None
    session.initialize(address, num_processes, process_id)


def num_processes() -> int:
    return session.process_count()


def process_id() -> int:
    return session.process_index()


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """A DistributedArray of a value that every process holds.

    While a rank computes a model, layers decide by their own rules how activations lie: there the tensor comes back as
    it is, and so does its value.
    """
    if context.frame() is not None or (isinstance(tensor, torch.Tensor) and tensor.is_meta):
        return tensor
    if isinstance(tensor, DistributedArray):
        return tensor.redistribute(layout)
    return array.distribute(tensor, layout.device_mesh, layout)


def distribute_value(value: Any, layout: Any) -> Any:
    return distribute_tensor(value, layout)


def _to_backend_mesh(device_mesh: Any) -> Any:
    return as_mesh(device_mesh)


def _to_backend_layout(tensor_layout: Any) -> Any:
    return as_layout(tensor_layout)
