"""GPUs: which one a process takes, what carries their tensors, and that no two processes share one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from unidist.errors import BackendNotAvailableError, CapabilityError, MeshError

DeviceType = Literal["cpu", "cuda"]

# What carries CUDA tensors between processes: "nccl", or "gloo", by way of the host, so that two ranks can be tried on
# one GPU.
TRANSPORT = "UNIDIST_TORCH_TRANSPORT"
# Keras's own word for where it computes on torch.
KERAS_DEVICE = "KERAS_TORCH_DEVICE"
# How gloo calls the thread that its messages come through.
GLOOS_THREAD = "gloo_tcp_loop"
# Of the machine, and of all containers on it.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def goes_by_host() -> bool:
    """Returns whether the environment says that CUDA tensors go over gloo.

    Raises:
        CapabilityError: it names neither gloo nor NCCL.
    """
    said = os.environ.get(TRANSPORT, "nccl")
    if said not in ("nccl", "gloo"):
        raise CapabilityError(f'{TRANSPORT} must be "nccl" or "gloo", found {said!r}')
    return said == "gloo"


def transports(device_type: str) -> str:
    """Returns what init_process_group is asked for: CPU tensors go over gloo in every world."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" and not goes_by_host() else "gloo"


def preferred() -> DeviceType:
    """Returns the kind of device where the program names none.

    It is CUDA's where there are any, unless Keras was given CPUs.
    """
    said = _said_to_keras()
    return "cuda" if torch.cuda.is_available() and (said is None or said.type != "cpu") else "cpu"


def bind(device_type: DeviceType, local_index: int | None) -> torch.device:
    """This process's device, made the current one. A process that sees one accelerator only has that one.

    Args:
        device_type: its kind.
        local_index: the process's number on its host; None: it is alone, and takes the one that is current.

    Raises:
        BackendNotAvailableError: there is none for it.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    said = _said_to_keras()
    if said is not None and said.type == "cuda" and said.index is not None:
        index = said.index
    elif local_index is None:
        index = torch.cuda.current_device() if count else 0
    else:
        # Over the host several processes may have one.
        index = local_index % count if count == 1 or (count and goes_by_host()) else local_index
    if index >= count:
        raise BackendNotAvailableError(
            f"process {local_index or 0} of this host needs an accelerator of its own, but {count} are visible: start "
            "fewer processes a host, or use('torch', devices=['cpu:0', ...]) to compute on CPUs"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _said_to_keras() -> torch.device | None:
    said = os.environ.get(KERAS_DEVICE, "").lower().replace("gpu", "cuda")
    try:
        return torch.device(said) if said else None
    except RuntimeError:  # Keras says so itself
        return None


def check_apart(device: torch.device, rank: int, size: int, store: Any) -> None:
    """Compares the processes' devices over the world's store, once all have joined.

    NCCL would refuse two ranks on one GPU only at their first collective, and in words of its own.

    Raises:
        MeshError: two processes have one GPU.
    """
    if device.type != "cuda" or size == 1 or goes_by_host():
        return
    keys = [f"unidist/device/{k}" for k in range(size)]
    store.set(keys[rank], json.dumps(identity(device)))
    store.wait(keys)
    owners: dict[tuple[str, str], list[int]] = {}
    told: Mapping[int, Any] = {k: json.loads(text) for k, text in enumerate(store.multi_get(keys))}
    for k, (host, name, _) in told.items():
        owners.setdefault((host, name), []).append(k)
    shared = next((ranks for ranks in owners.values() if len(ranks) > 1), None)
    if shared is not None:
        _, name, host = told[shared[0]]
        raise MeshError(
            f"ranks {' and '.join(map(str, shared))} compute on one device: {name} of host {host}. Each process needs "
            "a GPU of its own: start as many processes a host as it has GPUs, and let the launcher tell each its "
            f"number there (LOCAL_RANK), or show each another one by CUDA_VISIBLE_DEVICES. {TRANSPORT}=gloo tries "
            "several ranks on one GPU, slowly"
        )


def identity(device: torch.device) -> tuple[str, str, str]:
    """Returns (machine, device, host's name).

    The first two are the same in two processes only if they have one device.
    """
    host = socket.gethostname()
    try:
        machine = _BOOT.read_text().strip()
    except OSError:
        machine = host
    found = torch.cuda.get_device_properties(device)
    uuid = getattr(found, "uuid", None)
    return machine, f"GPU {device.index}" if uuid is None else f"GPU-{uuid}", host


def name_for_keras(device: torch.device) -> str:
    """Returns the device as Keras names it.

    Where a process sees one GPU alone that is "cuda". Keras compares with it where an operation needs another way
    there, as integers' matmul. With a number Keras does not know it for CUDA.
    """
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        return str(device)
    return device.type
