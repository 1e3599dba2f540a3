"""What the processes of test_devices run: where Keras computes, on a machine whose GPUs are made up."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import numpy as np

import unidist
from tests.torch.accelerators import cuda
from unidist.algebra import Group
from unidist.backends import environment


def start() -> None:
    """Before Keras is imported."""
    os.environ["KERAS_BACKEND"] = "torch"
    os.environ.pop("KERAS_TORCH_DEVICE", None)


def _device() -> str:
    from unidist.keras.patching.compat import torch_core

    return str(torch_core.DEFAULT_DEVICE)


def places(backend: str, keras_first: bool, devices: Any = None) -> tuple[list[str], float]:
    """(where Keras computes before, in, and after a world; the loss of a step in it, if that is on CPUs)."""
    with cuda(2):
        if keras_first:
            import keras

            before = _device()
            unidist.use(backend, devices=devices)
        else:
            unidist.use(backend, devices=devices)
            import keras

            before = "cuda"
        inside = _device()
        loss = 0.0
        if inside == "cpu":
            with unidist.DataParallel().scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
                model.compile("sgd", "mse")
            loss = float(model.train_on_batch(np.ones((4, 3)), np.ones((4, 2))))
        unidist.shutdown()
        return [before, inside, _device()], loss


def places_of_two_backends() -> list[str]:
    """Where Keras computes with one backend after the other."""
    import keras  # noqa: F401

    with cuda(2):
        found = []
        for name, devices in (("torch", None), ("sim", 2), ("torch", None), ("torch", ["cpu:0"])):
            unidist.use(name, devices=devices)
            found.append(_device())
        unidist.shutdown()
        return found


def place_after_joining() -> list[str]:
    """Where Keras computes before and after `initialize`, which alone gives a process its number."""
    import keras  # noqa: F401

    launch = environment.detect()
    assert launch is not None
    with cuda(4), mock.patch.dict(os.environ, environment.without_launcher(os.environ), clear=True):
        unidist.use("torch")
        before = _device()
        unidist.initialize(launch.address, launch.process_count, launch.process_index)
        found = [before, _device()]
        unidist.shutdown()
        return found


def place_without_gpus() -> tuple[str, str]:
    """What Keras chose by itself is left alone where there are no GPUs: here made up, as on a Mac."""
    from unidist.keras.patching.compat import torch_core

    with mock.patch.object(torch_core, "DEFAULT_DEVICE", "mps"):
        unidist.use("torch")
        own = _device()
        unidist.use("torch", devices=["cpu:0"])
        asked = _device()
        unidist.shutdown()
        return own, asked


def groups_of_a_step(zero: int) -> list[tuple[str, tuple[int, ...]]]:
    """What is done with which ranks in a first step, in order: groups are made ready, and buffers are moved."""
    import keras

    from unidist.backends.torch.backend import TorchBackend
    from unidist.backends.torch.comm import TorchComm

    found: list[tuple[str, tuple[int, ...]]] = []
    with contextlib.ExitStack() as stack:
        for name in ("all_reduce_inplace", "reduce_scatter_into", "all_gather_into"):
            original = getattr(TorchComm, name)

            def moving(self: Any, *args: Any, original: Any = original) -> Any:
                group = next(one for one in args if isinstance(one, Group))
                found.append(("moved", group.ranks))
                return original(self, *args)

            stack.enter_context(mock.patch.object(TorchComm, name, moving))
        noting = mock.patch.object(TorchBackend, "ready", lambda self, group: found.append(("ready", group.ranks)))
        stack.enter_context(noting)
        unidist.use("torch")
        with unidist.DataParallel(zero=zero).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("adam", "mse")
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    unidist.shutdown()
    return found
