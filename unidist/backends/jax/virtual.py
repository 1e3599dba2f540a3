"""Counts JAX's virtual CPU devices, before XLA starts. Imports no framework by itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from unidist.errors import BackendMismatchError

_VARIABLE = "JAX_NUM_CPU_DEVICES"
_PLATFORMS = "JAX_PLATFORMS"
# XLA's threads on CPU: how many there are, at least, and for each device.
_THREADS = "PJRT_NPROC"
_LEAST = 32
_PER_DEVICE = 8


def prepare_devices(count: int) -> None:
    """Gives JAX `count` virtual CPU devices, and no accelerators unless JAX_PLATFORMS names them.

    JAX may be imported already, but XLA must not have started.

    Raises:
        BackendMismatchError: XLA has started with fewer devices.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        _widen_pool(count)
        os.environ[_VARIABLE] = str(count)
        os.environ.setdefault(_PLATFORMS, "cpu")
        return
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    set_count(jax, count)


def set_count(jax: Any, count: int, *, exactly: bool = False) -> None:
    """Gives JAX, which is imported, `count` virtual CPU devices.

    Raises:
        BackendMismatchError: XLA has started with fewer devices, or, if `exactly`, with more.
    """
    _widen_pool(count)
    if jax.config.jax_num_cpu_devices == count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        found = len(jax.local_devices(backend="cpu"))
        if found < count or (exactly and found > count):
            raise BackendMismatchError(
                f"{count} virtual devices were asked for, but JAX has started with {found}, and cannot change it: "
                f"call unidist.use(..., devices={count}) before the first JAX or Keras operation, "
                f"or set {_VARIABLE}={count}"
            ) from error


def _widen_pool(count: int) -> None:
    """Gives XLA threads enough for `count` virtual devices.

    No effect once XLA has started, or where PJRT_NPROC is set.

    XLA takes as many threads as there are cores or devices. A device that waits in a collective holds a thread of
    this pool; on few cores the last device may then find none to compute with, and XLA ends the process after 40 s
    ("Expected 4 threads to join the rendezvous, but only 3 of them arrived on time").
    """
    os.environ.setdefault(_THREADS, str(max(_LEAST, _PER_DEVICE * count, os.cpu_count() or 1)))
