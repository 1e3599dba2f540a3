"""Counts JAX's virtual CPU devices, before XLA starts. Imports no framework by itself."""

from __future__ import annotations

import os
import sys

from unidist.backends.jax.pool import widen_pool
from unidist.errors import BackendMismatchError

_VARIABLE = "JAX_NUM_CPU_DEVICES"
_PLATFORMS = "JAX_PLATFORMS"


def prepare_devices(count: int) -> None:
    """Gives JAX `count` virtual CPU devices, and no accelerators unless JAX_PLATFORMS names them.

    JAX may be imported already, but XLA must not have started.

    Raises:
        BackendMismatchError: XLA has started with fewer devices.
    """
    widen_pool(count)
    jax = sys.modules.get("jax")
    if jax is None:
        os.environ[_VARIABLE] = str(count)
        os.environ.setdefault(_PLATFORMS, "cpu")
        return
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices == count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        found = len(jax.devices("cpu"))
        if found < count:
            raise BackendMismatchError(
                f"{count} virtual devices were asked for, but JAX has started with {found}, and cannot change it: "
                f"call unidist.use(..., devices={count}) before the first JAX or Keras operation, "
                f"or set {_VARIABLE}={count}"
            ) from error
