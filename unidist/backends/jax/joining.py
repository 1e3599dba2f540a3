"""Joins a world of jax.distributed: from an address, a launcher's environment, or one already there.

At its exit JAX waits for all processes. One that failed would so keep the others waiting for it in a collective, and
one that was left by another would wait for that one, then be aborted. A process whose world is broken ends at once.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
from jax._src import xla_bridge
from jax.extend.backend import clear_backends

from unidist.backends.ending import has_failed
from unidist.backends.environment import Launch
from unidist.backends.jax import relay, roll, waiting
from unidist.backends.jax.devices import config
from unidist.backends.joining import check_same, placed
from unidist.backends.lines import is_loopback, own_address
from unidist.backends.protocol import Cluster
from unidist.errors import BackendMismatchError, BackendNotAvailableError, ProcessLostError

# JAX aborts a process whose peer has been silent for so long, where nothing in Python could end it: after the world's
# timeout and with time to say so.
_SILENCE = 100


@dataclass(frozen=True, slots=True)
class Membership:
    """The processes that this one belongs to.

    Attributes:
        timeout: seconds that a collective waits for the others.
        roll: knows which processes have ended; None in a world of one and in one that somebody else made.
        stay: takes back that this process ends at once where the world is broken.
    """

    count: int
    index: int
    timeout: float
    roll: roll.Roll | None = None
    stay: Callable[[], None] | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """The processes that have ended."""
        return () if self.roll is None else tuple(sorted(self.roll.lost))

    def leave(self) -> None:
        """Ends jax.distributed and drops XLA's devices, so that another world can be joined.

        It waits for the others. A world that has lost a process ends only with this process.
        """
        global _joined
        if self.roll is not None and self.roll.is_broken:
            return
        if _joined is not None:
            _joined = None
            waiting.unwatch()
        if self.roll is not None and self.stay is not None:
            self.roll.close()
            jax.distributed.shutdown()
            self.stay()
            clear_backends()


# The world of several processes that this one is in, and joined through unidist.
_joined: Membership | None = None


def current() -> Membership | None:
    """Returns the world of several processes that this one has joined, whoever made it; None without one."""
    return _joined


def with_timeout(world: Membership, seconds: float) -> Membership:
    """The world, in which collectives and reads wait for so long from now on."""
    changed = replace(world, timeout=seconds)
    return _entered(changed) if _joined is not None else changed


def _entered(world: Membership) -> Membership:
    global _joined
    if world.count > 1:
        _joined = world
        waiting.watch(world)
    return world


def join(cluster: Cluster) -> Membership:
    """Joins the world that the cluster, an existing jax.distributed or the launcher describes.

    Where none does, it is a world of one.

    Raises:
        BackendMismatchError: the cluster and the existing world contradict each other, or XLA has started.
        BackendNotAvailableError: the world could not be joined.
        ProcessLostError: this process is in a world that has lost another.
    """
    if _joined is not None and _joined.roll is not None and _joined.roll.is_broken:
        raise ProcessLostError(
            f"this process is in a world of {_joined.count} that has lost another, and JAX cannot leave that: start "
            "all processes again"
        )
    if jax.distributed.is_initialized():
        return _entered(_existing(cluster))
    place = placed(cluster, "`unidist run -n {count} --backend jax script.py`", address_of)
    if place.count == 1:
        return Membership(1, 0, cluster.timeout)
    return _entered(_come_together(place.address, place.count, place.index, cluster.timeout, place.launch))


def _come_together(address: str, count: int, index: int, timeout: float, launch: Launch | None) -> Membership:
    _check_not_started()
    present = roll.call(address, count, index, timeout)
    way = _way(present.coordinator) if index else None
    try:
        _start(present.coordinator, way, count, index, timeout, _local_devices(launch))
    except RuntimeError as error:
        present.close()
        if way:
            way.close()
        raise BackendNotAvailableError(
            f"process {index} of {count}: JAX could not join the others ({error})"
        ) from error
    return Membership(count, index, timeout, present, _until_left(present, way))


def _way(coordinator: str) -> relay.Relay:
    host, _, port = coordinator.rpartition(":")
    return relay.Relay(host.strip("[]"), int(port))


def _until_left(present: roll.Roll, way: relay.Relay | None) -> Callable[[], None]:
    """Registers what holds at this process's exit. Returns what takes it back."""
    stay = at_exit(lambda: present.is_broken, way.let_go if way else None)

    def leave() -> None:
        stay()
        if way:
            way.close()

    return leave


def _existing(cluster: Cluster) -> Membership:
    count, index = jax.process_count(), jax.process_index()
    remedy = ": leave the arguments out to use that, or shut it down first"
    check_same(cluster, index, count, "jax.distributed was initialised", remedy)
    return Membership(count, index, cluster.timeout)


def _check_not_started() -> None:
    """Raises where XLA's devices exist already: JAX makes a world of them only at the start."""
    count = config.jax_num_cpu_devices
    try:
        # JAX has no question for it, but refuses to change this afterwards.
        config.update("jax_num_cpu_devices", max(count, 0) + 1)
        config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise BackendMismatchError(
            "JAX has started in this process already, alone: call unidist.initialize (or unidist.use under a launcher) "
            "before any JAX operation, as jax.distributed.initialize demands"
        ) from error


def address_of(launch: Launch | None) -> str | None:
    """Returns the launcher's address; beside torchrun's own store, that address with the next port.

    There torchrun's agent listens on MASTER_PORT.
    """
    if launch is None or launch.address is None:
        return None
    if launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, _, port = launch.address.rpartition(":")
        return f"{host}:{int(port) + 1}"
    return launch.address


def _local_devices(launch: Launch | None) -> list[int] | None:
    """Returns the accelerators of this process, by number; None: all.

    Under a launcher that starts several on a host it is the one of its number.
    """
    alone = launch is None or launch.local_count == 1 or "JAX_LOCAL_DEVICE_IDS" in os.environ
    return None if launch is None or alone else [launch.local_index]


def _start(
    coordinator: str, way: relay.Relay | None, count: int, index: int, timeout: float, local: list[int] | None
) -> None:
    host, _, port = coordinator.rpartition(":")
    seconds = max(1, math.ceil(timeout))
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It catches SIGTERM, by which launchers end the processes of a job.
        config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        way.address if way else coordinator,
        count,
        index,
        local_device_ids=local,
        cluster_detection_method="deactivate",
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=seconds + _SILENCE,
        shutdown_timeout_seconds=seconds,
        coordinator_bind_address=f"{host}:{port}" if is_loopback(host.strip("[]")) else None,
    )
    with _listening_at(host.strip("[]")):
        jax.devices()  # the processes exchange their devices now, not at the first array


@contextmanager
def _listening_at(host: str) -> Iterator[None]:
    """Makes the CPU's collectives, inside, listen where a host is reached from, not at the hostname."""
    library: Any = vars(xla_bridge)["_jax"]
    make = library.make_gloo_tcp_collectives
    library.make_gloo_tcp_collectives = partial(make, hostname=host if is_loopback(host) else own_address(host))
    try:
        yield
    finally:
        library.make_gloo_tcp_collectives = make


_FAILED = 1


def at_exit(is_lost: Callable[[], bool], before: Callable[[], None] | None = None) -> Callable[[], None]:
    """Ends the process without waiting where it failed or `is_lost`. Gives what takes that back.

    Called before JAX's own handler, as it is registered after it.

    Args:
        before: called where JAX's own handler is to wait for the others.
    """

    def handler() -> None:
        if is_lost() or has_failed():
            _end()
        if before is not None:
            before()

    atexit.register(handler)
    return lambda: atexit.unregister(handler)


def _end() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # What `unidist run` has left here where the program ended itself.
    last = getattr(sys, "last_value", None)
    own = last.code if isinstance(last, SystemExit) and isinstance(last.code, int) else _FAILED
    os._exit(own & 0xFF)
