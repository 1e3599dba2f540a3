"""What the processes of a JAX world tell each other on the host: bytes, whole arrays, and that they are there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from unidist.backends import registry
from unidist.backends.protocol import Array
from unidist.keras import distribution_lib
from unidist.keras.agreement import Peers
from unidist.keras.first import bytes_of_first
from unidist.keras.writing import Crew


def several() -> bool:
    """Whether the world has more than one process."""
    return int(jax.process_count()) > 1


def is_first() -> bool:
    """Whether this is the process that writes and shows."""
    return int(jax.process_index()) == 0


def from_first(data: bytes) -> bytes:
    """Process 0's bytes, on every process. A collective of the world."""
    if not several():
        return data
    ranks = tuple(device.id for device in jax.local_devices())
    return bytes_of_first(data, _of_first, is_first=is_first(), ranks=ranks)


def array_from_first(value: Array) -> Array:
    """Process 0's values of an array that all processes have with this shape and dtype. A collective of the world."""
    return np.frombuffer(from_first(value.tobytes()), value.dtype).reshape(value.shape)


def _of_first(own: Array) -> Array:
    return np.asarray(multihost_utils.broadcast_one_to_all(own))


def crew() -> Crew | None:
    """The processes of the world, if there are several."""
    return Crew(is_first(), lambda text: from_first(text.encode()).decode()) if several() else None


def of_all(number: int) -> tuple[int, ...]:
    """Every process's number, by process. A collective of the world."""
    if not several():
        return (number,)
    return tuple(int(n) for n in np.ravel(multihost_utils.process_allgather(np.int32(number))))


def ranks_of(process: int) -> tuple[int, ...]:
    """The ranks of a process's devices."""
    return tuple(device.id for device in jax.devices() if device.process_index == process)


def peers() -> Peers | None:
    """The processes of the world, if there are several."""
    if not several():
        return None

    def replica(variable: Any) -> Array | None:
        value = variable._value
        if not isinstance(value, jax.Array) or not value.is_fully_replicated:
            return None
        found: Array = np.asarray(value.addressable_data(0))
        return found.astype(np.float32) if found.dtype == jax.numpy.bfloat16 else found

    ranks = tuple(ranks_of(process)[0] for process in range(jax.process_count()))
    return Peers(of_all=of_all, ranks=ranks, own=int(jax.process_index()), replica=replica)


def whole(array: Any) -> Array:
    """The full value of a JAX array on every process. A collective of the world where it spans processes."""
    spans = isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)
    host: Array = np.asarray(multihost_utils.process_allgather(array, tiled=True) if spans else array)
    return host


def put(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A JAX array of a sharding, from the same full value on every process."""
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(value, sharding)
        return placed
    host = whole(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def joining(original: Callable[..., None]) -> Callable[..., None]:
    """keras.distribution.initialize: the world of unidist's JAX adapter, where that is in use.

    Under a launcher it is joined already, and Keras would ask JAX to join a second time.
    """

    @functools.wraps(original)
    def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
        if not registry.has_current() or registry.current().name != "jax":
            original(job_addresses, num_processes, process_id)
            return
        distribution_lib.initialize(job_addresses, num_processes, process_id)

    return initialize
