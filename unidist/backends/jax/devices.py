"""JAX's devices: virtual ones on CPU, and their names as Keras gives them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from unidist.backends.jax.virtual import set_count
from unidist.backends.protocol import ALL_DTYPES, Capabilities, DistributionBackend, dtype_name
from unidist.backends.validation import check_dtype
from unidist.errors import BackendMismatchError, BackendNotAvailableError, MeshError

# JAX makes its options when it is imported, where type checkers cannot see them.
config: Any = jax.config


def name_of(device: jax.Device) -> str:
    """Returns a name as keras.distribution.list_devices gives it: "cpu:0".

    In several processes JAX's ids have gaps: cpu:0, cpu:1, cpu:2048.
    """
    return f"{device.platform}:{device.id}"


def make_virtual(count: int) -> None:
    """Gives this process `count` virtual CPU devices.

    XLA must not have started otherwise; JAX may be there.

    Raises:
        MeshError: fewer than one.
        BackendMismatchError: XLA has started with another number.
    """
    if count < 1:
        raise MeshError(f"jax needs at least one device, found devices={count}: use('jax', devices=4)")
    set_count(jax, count, exactly=True)


def make_named(names: Sequence[str]) -> None:
    """Gives this process virtual CPU devices where CPUs are named from the first on.

    Does nothing where somebody has said how many there are.
    """
    asked = [f"cpu:{k}" for k in range(len(names))]
    said = config.jax_num_cpu_devices >= 0 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if len(names) > 1 and list(names) == asked and not said:
        with contextlib.suppress(BackendMismatchError):  # what is missing then is reported by its name
            make_virtual(len(names))


def find(devices: int | Sequence[str] | None) -> tuple[jax.Device, ...]:
    """The devices of the world in rank order. Starts XLA.

    Args:
        devices: None: all of JAX's default platform; a number: these too, if each process has so many (on CPUs it has);
            names: these, in this order.

    Raises:
        BackendNotAvailableError: JAX has no such platform or device.
        MeshError: a device is named twice, or none is named; or there are accelerators, and not as many.
    """
    if devices is None:
        return tuple(jax.devices())
    if isinstance(devices, int):
        return _counted(devices)
    names = list(devices)
    if not names or len(set(names)) != len(names):
        raise MeshError(f"jax: devices={names} must name at least one device, and each once")
    known = {name_of(device): device for kind in sorted({_kind(name) for name in names}) for device in _of_kind(kind)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BackendNotAvailableError(f"jax has no device {unknown[0]!r}: it has {list(known)}")
    return tuple(known[name] for name in names)


def _counted(count: int) -> tuple[jax.Device, ...]:
    kind, found = jax.default_backend(), len(jax.local_devices())
    if kind == "cpu":
        return tuple(jax.devices("cpu"))
    if found != count:
        raise MeshError(
            f"use('jax', devices={count}): this process has {found} devices of kind {kind!r}, which a number means. "
            f"Give devices={found}, or name CPUs, which are virtual: devices=['cpu:0', ..., 'cpu:{count - 1}']"
        )
    return tuple(jax.devices())


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _of_kind(kind: str) -> list[jax.Device]:
    try:
        return list(jax.devices(kind))
    except RuntimeError as error:  # no such platform here
        raise BackendNotAvailableError(
            f"jax has no {kind!r} devices here ({error}): install JAX for that platform, or name others"
        ) from error


# All that can be moved as JAX's own dtypes.
DTYPES = frozenset(jax.numpy.dtype(name) for name in ALL_DTYPES)
_WIDE = frozenset(("int64", "float64"))


class Configured:
    """The adapter's `capabilities`: what they are now."""

    def __get__(self, instance: object, owner: type) -> Capabilities:
        return _capabilities(bool(config.jax_enable_x64))


@lru_cache(maxsize=2)
def _capabilities(wide: bool) -> Capabilities:
    return Capabilities(view="global", uneven="padded", dtypes=ALL_DTYPES if wide else ALL_DTYPES - _WIDE)


def check_movable(backend: DistributionBackend, x: Any) -> None:
    """Raises CapabilityError where arrays of x's dtype are not moved as JAX is configured."""
    found = dtype_name(x)
    hint = ', or call jax.config.update("jax_enable_x64", True) first' if found in _WIDE else ""
    check_dtype(backend, found, hint)
