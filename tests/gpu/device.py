"""What the GPU tests run on. None of it has ever run on a GPU; on CPUs it has.

DEVICE is "cuda", or what TESTS_GPU_DEVICE says: on "cpu" all but the device is tried. Collectives then go the way of
CUDA tensors: over the host, as two ranks on one GPU, or as over NCCL, whose place gloo takes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import unidist
from tests.torch.accelerators import nowhere_near
from unidist.algebra import Group
from unidist.backends.torch.transports import Transport, Transports
from unidist.testing.processes import ProcessWorld, free_port

DEVICE = os.environ.get("TESTS_GPU_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
# Sums of atomics come in any order on a GPU.
TOLERANCE = 1e-4 if ON_GPU else 1e-5
OWN = "cuda:0" if ON_GPU else "cpu"
# As `use` and a mesh name the first device.
NAME = "gpu:0" if ON_GPU else "cpu:0"
COUNT = torch.cuda.device_count() if ON_GPU else 0

ON_TORCH = {"KERAS_BACKEND": "torch", "KERAS_TORCH_DEVICE": None}
ENVIRONMENT = {**ON_TORCH, "CUDA_VISIBLE_DEVICES": "0"}
OVER_GLOO = {**ENVIRONMENT, "UNIDIST_TORCH_TRANSPORT": "gloo"}


def start(joins: bool, as_nccl: bool = False) -> None:
    """Makes the process ready: with unidist, or with Keras alone, as a user has it without.

    as_nccl: on CPUs too tensors go the way of NCCL's collectives.
    """
    # Numbers are compared with one device's: no shortcuts that lose digits.
    torch.backends.cudnn.allow_tf32 = False
    if joins:
        if as_nccl and not ON_GPU:
            instead_of_nccl()
        unidist.use("torch")
        if not ON_GPU:
            nowhere_near()
    import keras

    keras.utils.disable_interactive_logging()


def instead_of_nccl() -> None:
    """From here on no tensor goes over the host: gloo's collectives take the place of NCCL's."""
    make = Transports._make

    def made(self: Transports, group: Group, *args: Any) -> Transport:
        found = make(self, group, *args)
        object.__setattr__(found, "goes_by_host", False)
        return found

    mock.patch.object(Transports, "_make", made).start()


def process(joins: bool | None = None) -> ProcessWorld:
    """A process of its own: new, since one that is forked from another cannot use CUDA if that has looked for it."""
    setup: Any = {} if joins is None else {"setup": start, "setup_args": (joins,)}
    return ProcessWorld(1, launcher=None, env=ENVIRONMENT, timeout=300, **setup)


def ranks(count: int, **env: str) -> ProcessWorld:
    """Ranks with a GPU each, over NCCL."""
    return ProcessWorld(count, env={**ON_TORCH, **env}, setup=start, setup_args=(True, True), timeout=300)


def needs(gpus: int, *, more_than_cpus: bool = False) -> pytest.MarkDecorator:
    """Skips a test where there are fewer GPUs; `more_than_cpus`: on CPUs too, where so many processes are too many."""
    if not ON_GPU:
        return pytest.mark.skipif(more_than_cpus, reason=f"{gpus} processes are for as many GPUs")
    return pytest.mark.skipif(gpus > COUNT, reason=f"needs {gpus} GPUs, there are {COUNT}")


def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def pause(seconds: float = 0.003) -> None:
    """Holds up the stream that works now, and not the program; on a CPU they are one."""
    if ON_GPU:
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
    else:
        time.sleep(seconds)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Inside, what waits for the GPU raises."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
