"""What a process of test_accelerators runs: TensorFlow's GPUs, made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tensorflow as tf

from unidist.backends.horovod import over_tensorflow
from unidist.backends.tensorflow import devices
from unidist.errors import UnidistError


class Config:
    """What TensorFlow is given."""

    def __init__(self, count: int, has_started: bool) -> None:
        self.seen = [f"GPU:{k}" for k in range(count)]
        self.has_started = has_started
        self.growing: list[str] = []

    def get(self, kind: str) -> list[str]:
        return self.seen

    def set(self, found: list[str], kind: str) -> None:
        if self.has_started:
            raise RuntimeError("visible devices cannot be modified after being initialized")
        self.seen = list(found)


@contextmanager
def gpus(count: int, *, has_started: bool = False) -> Iterator[Config]:
    found = Config(count, has_started)
    logical = [SimpleNamespace(name=f"/device:GPU:{k}") for k in range(count)]
    with ExitStack() as stack:
        for owner, name, value in (
            (tf.config, "get_visible_devices", found.get),
            (tf.config, "set_visible_devices", found.set),
            (tf.config, "list_logical_devices", lambda kind: logical),
            (tf.config.experimental, "set_memory_growth", lambda gpu, grows: found.growing.append(gpu)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield found


def _said(work: Any) -> str:
    try:
        work()
    except UnidistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shares() -> list[Any]:
    """The GPUs that processes take: (of how many, their number on the host, how many there are, each takes)."""
    found = []
    for seen, index, local, count in ((4, 2, 4, 1), (4, 1, 2, 2), (4, 0, 1, 1), (1, 3, None, 1), (4, 3, None, 1)):
        with gpus(seen) as config:
            devices.take_gpus(index, local, count)
            found.append((config.seen, config.growing == config.seen))
    return found


def too_many() -> str:
    with gpus(2):
        return _said(lambda: devices.take_gpus(2, 4))


def hidden() -> list[Any]:
    found: list[Any] = []
    for hide in (devices.hide_gpus, over_tensorflow.make_ops):
        with gpus(2) as config:
            hide()
            found.append(config.seen)
        with gpus(2, has_started=True):
            found.append(_said(hide))
    return found


def counted() -> list[Any]:
    with gpus(2):
        return [list(devices.find(2)), _said(lambda: devices.find(8))]


def named() -> list[str]:
    """Virtual CPUs by their names."""
    import unidist

    unidist.use("tensorflow", devices=["cpu:0", "cpu:1", "cpu:2"])
    return unidist.list_devices()
