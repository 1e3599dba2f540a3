"""Joins the world: by horovodrun's environment, at an address, or as the program has joined it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unidist.backends.environment import detect
from unidist.backends.horovod import rendezvous
from unidist.backends.joining import check_same, placed
from unidist.backends.protocol import Cluster
from unidist.backends.turns import interrupting_nobody
from unidist.errors import BackendNotAvailableError

# The servers of this process by their address. They stay when a world is left: the next one may be joined there.
_servers: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True, slots=True)
class Membership:
    """The processes that this one belongs to.

    Attributes:
        rank: this process's number, which is its device's.
        size: number of processes.
        timeout: seconds that a collective waits.
        is_ours: whether leaving the world ends Horovod.
        before: what the environment held, before this world was joined, under the names that joining has set.
    """

    rank: int
    size: int
    timeout: float
    is_ours: bool
    before: Mapping[str, str | None] = field(default_factory=dict)


def join(cluster: Cluster, hvd: Any) -> Membership:
    """Joins the world that the program, the cluster or the launcher describes.

    Where none does, it is a world of one, without Horovod.

    Raises:
        BackendMismatchError: the cluster and a world that is already there contradict each other.
        BackendNotAvailableError: the world could not be joined.
    """
    if hvd.is_initialized():
        return _existing(cluster, hvd)
    launch = detect()
    if launch is not None and launch.launcher == "horovod" and cluster.address is None:
        _check(cluster, launch.process_index, launch.process_count)
        return _initialised(hvd, launch.process_index, launch.process_count, cluster.timeout, {})
    start = "`unidist run --backend horovod -n {count} script.py` or `horovodrun -np {count} python script.py`"
    place = placed(cluster, start)
    if place.count == 1:
        return Membership(0, 1, cluster.timeout, False)
    variables = _at(place.address, place.count, place.index, cluster.timeout)
    return _initialised(hvd, place.index, place.count, cluster.timeout, variables)


def leave(world: Membership, hvd: Any) -> None:
    if world.is_ours and hvd.is_initialized():
        hvd.shutdown()
    _put(world.before)


def _existing(cluster: Cluster, hvd: Any) -> Membership:
    rank, size = hvd.rank(), hvd.size()
    _check(cluster, rank, size)
    return Membership(rank, size, cluster.timeout, False)


def _check(cluster: Cluster, rank: int, size: int) -> None:
    check_same(cluster, rank, size, "Horovod's world has this", ": leave the arguments out to use that")


def _at(address: str, count: int, index: int, timeout: float) -> dict[str, str]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    # Each process counts as a host of its own: only the launcher would know which of them share one.
    world = rendezvous.slots(count, 1)
    try:
        if index == 0 and (host, int(port)) not in _servers:
            _servers[host, int(port)] = rendezvous.serve(host, int(port), world)
        rendezvous.wait_for(host, int(port), timeout)
        return rendezvous.variables(world[index], host, int(port))
    except OSError as error:  # TimeoutError too
        raise BackendNotAvailableError(
            f"process {index} of {count} could not reach the others at {address} within {timeout:g} s ({error}): check "
            "that all processes were started, that process 0's host and port can be reached from here, and that "
            "nothing else listens there (under torchrun its own store does: use horovodrun or `unidist run`)"
        ) from error


def _initialised(hvd: Any, index: int, count: int, timeout: float, variables: dict[str, str]) -> Membership:
    # The first is for a process that has stopped; one that is elsewhere is found by lost.wait. Names of collectives
    # are numbers here, so that ranks that part are reported at once; Horovod's cache only knows names that come again.
    defaults = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(timeout)), "HOROVOD_CACHE_CAPACITY": "0"}
    chosen = {**{name: value for name, value in defaults.items() if name not in os.environ}, **variables}
    chosen["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    before = {name: os.environ.get(name) for name in chosen}
    _put(chosen)
    begun = time.monotonic()
    try:
        with interrupting_nobody():
            hvd.init(process_sets="dynamic")
    except (RuntimeError, ValueError) as error:
        _put(before)
        raise BackendNotAvailableError(
            f"process {index} of {count} could not join the others through Horovod "
            f"({time.monotonic() - begun:.0f} s; {str(error).splitlines()[0]}): check that all {count} processes were "
            "started and that the machines reach each other"
        ) from error
    return Membership(hvd.rank(), hvd.size(), timeout, True, before)


def _put(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
