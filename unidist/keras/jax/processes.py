"""Exchanges bytes and whole arrays between a JAX world's processes on the host, and lets them meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unidist.backends import environment, registry
from unidist.backends.checking import checks_all
from unidist.backends.jax import agreeing, waiting
from unidist.backends.jax.joining import Membership
from unidist.backends.jax.joining import current as world_joined
from unidist.backends.noting import Noted
from unidist.backends.protocol import Array
from unidist.keras import distribution_lib
from unidist.keras.consistency.agreement import Peers
from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.patches import calling

_VALUE = "reading a value"
_compared: set[Any] = set()


def several() -> bool:
    """Returns whether the world has more than one process."""
    return int(jax.process_count()) > 1


def is_first() -> bool:
    """Returns whether this is the process that writes and shows."""
    return int(jax.process_index()) == 0


def lost(what: str) -> AbstractContextManager[None]:
    """Inside, an error by which another process is gone is a ProcessLostError."""
    return waiting.lost_in(world_joined(), what)


def array_from_first(value: Array, purpose: str) -> Array:
    """Returns process 0's values of an array that all processes have with this shape and dtype.

    A collective of the world.

    Raises:
        DesyncError: another process has come to something else.
    """
    _meet(purpose, {"array": f"{value.dtype} {value.shape}"})
    data = _all(lambda array, purpose: _of_first(array)).bytes_of_first(value.tobytes(), purpose)
    return np.frombuffer(data, value.dtype).reshape(value.shape)


def _meet(purpose: str, how: Mapping[str, str] = MappingProxyType({}), value: str = "") -> list[str]:
    """Returns what each process has said, when all have come to the same."""
    count = jax.process_count()
    world = world_joined() or Membership(count, jax.process_index(), environment.timeout())
    return agreeing.meet(world, purpose, how, range(count), jax.devices(), value)


def meet(purpose: str) -> None:
    """Returns when all processes have come to the same. A collective of the world.

    Raises:
        DesyncError: another process has come to something else.
    """
    if several():
        _meet(purpose)


def _of_first(own: Array) -> Array:
    """The first process's array: the sum of all, where the others are zeros."""
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    processes = Mesh(devices, ("process", "device"))
    sharding = NamedSharding(processes, PartitionSpec("process"))
    part = own[None] if is_first() else np.zeros_like(own)[None]
    each = jax.make_array_from_process_local_data(sharding, part, (jax.process_count(), *own.shape))
    return _read(_summed(NamedSharding(processes, PartitionSpec())), each, "broadcast of the first process's bytes")


@functools.lru_cache(maxsize=8)
def _summed(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda each: waiting.unhurried(jax.numpy.sum(each, 0, each.dtype)), out_shardings=sharding)


def _read(program: Callable[[jax.Array], jax.Array], array: jax.Array, what: str) -> Array:
    """Returns what the program gives, which is the same on every device.

    Waits for it as long as the world does.
    """
    world = world_joined()
    if world is None:
        return np.asarray(program(array).addressable_data(0))
    with Noted(waiting.kind(what, world)), lost(what):
        found = program(array)
        waiting.until_ready(found, world, what, is_noted=True)
        return np.asarray(found.addressable_data(0))


def processes() -> Processes | None:
    """Returns the processes of the world, if there are several."""

    def of_first(array: Array, purpose: str) -> Array:
        _meet(purpose)
        return _of_first(array)

    return _all(of_first) if several() else None


def _all(of_first: Callable[[Array, str], Array]) -> Processes:
    return Processes(int(jax.process_index()), _ranks(tuple(jax.devices())), of_first, of_all)


@functools.lru_cache(maxsize=4)
def _ranks(devices: tuple[jax.Device, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(ranks_of, range(jax.process_count())))


def of_all(number: int, purpose: str) -> tuple[int, ...]:
    """Every process's number, by process. A collective of the world.

    Args:
        number: of this process.
        purpose: what it is for; all processes must have come to the same.

    Raises:
        DesyncError: another process has come to something else.
    """
    return tuple(map(int, _meet(purpose, value=str(number)))) if several() else (number,)


def ranks_of(process: int) -> tuple[int, ...]:
    """The ranks of a process's devices."""
    return tuple(rank for rank, device in enumerate(jax.devices()) if device.process_index == process)


def peers() -> Peers | None:
    """The processes of the world, if there are several."""

    def replica(variable: Any) -> Array | None:
        value = variable._value
        if not isinstance(value, jax.Array) or not value.is_fully_replicated:
            return None
        found: Array = np.asarray(value.addressable_data(0))
        return found

    found = processes()
    return None if found is None else Peers(found, replica)


def whole(array: Any) -> Array:
    """The full value of a JAX array on every process. A collective of the world where it spans processes."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return _read(_same, array, _VALUE)
    _compare(array)
    return _read(_gathered(array.sharding), array, _VALUE)


def _compare(array: jax.Array) -> None:
    """Compares what the processes gather, when it is new, or always where UNIDIST_CHECK is "all"."""
    key = array.sharding, array.shape, array.dtype
    if key not in _compared or checks_all():
        _meet(_VALUE, {"array": f"{array.dtype} {array.shape}"})
        _compared.add(key)


@functools.lru_cache(maxsize=1024)
def _gathered(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if named else Mesh(np.array(sharding._device_assignment), ("device",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        lambda value: waiting.unhurried(jax.lax.with_sharding_constraint(value, everywhere)), out_shardings=everywhere
    )


def _same(value: Any) -> Any:
    return value


def put(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A JAX array of a sharding, from the same full value on every process."""
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(value, sharding)
        return placed
    host = whole(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@calling
def joining(original: Any, job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    """keras.distribution.initialize: the world of unidist's JAX adapter, where that is in use.

    Under a launcher it is joined already, and Keras would ask JAX to join a second time.
    """
    if not registry.has_current() or registry.in_use().virtual:
        original(job_addresses, num_processes, process_id)
        return
    distribution_lib.initialize(job_addresses, num_processes, process_id)
