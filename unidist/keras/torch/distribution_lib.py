"""Answers what Keras's distribution API asks of a backend, for torch: keras.distribution calls it."""

from __future__ import annotations

from typing import Any

import torch

from unidist import array
from unidist.array import DistributedArray, as_layout, as_mesh
from unidist.keras.distribution_lib import get_device_count as get_device_count
from unidist.keras.distribution_lib import initialize as initialize
from unidist.keras.distribution_lib import list_devices as list_devices
from unidist.keras.distribution_lib import num_processes as num_processes
from unidist.keras.distribution_lib import process_id as process_id
from unidist.keras.torch import context


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """A DistributedArray of a value that every process holds.

    While a rank computes a model, layers lay out activations by their own rules: there the tensor comes back as
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
