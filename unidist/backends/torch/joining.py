"""Joins the world: from a launcher's environment, an address, or an existing process group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # exported, but not by name

from unidist.backends.joining import check_same, placed
from unidist.backends.protocol import Cluster
from unidist.backends.torch import accelerators
from unidist.backends.torch.accelerators import DeviceType
from unidist.backends.turns import interrupting_nobody
from unidist.errors import BackendNotAvailableError, UnidistError

# The stores of this process, by where they are, and how often a world was joined there. They stay when a world is left:
# others may still be joining through process 0's, and the next world at the same address must not meet their leftovers.
_stores: dict[tuple[str, int, int], tuple[Any, Iterator[int]]] = {}


@dataclass(frozen=True, slots=True)
class Membership:
    """The processes that this one belongs to.

    Attributes:
        rank: this process's number, which is its device's.
        size: number of processes.
        device: where this rank's tensors live.
        timeout: seconds that a collective waits.
        is_ours: whether leaving the world ends torch's process group.
    """

    rank: int
    size: int
    device: torch.device
    timeout: float
    is_ours: bool


def join(cluster: Cluster, device_type: DeviceType) -> Membership:
    """Joins the world that the cluster, an existing process group or the launcher describes.

    Where none does, it is a world of one.

    Raises:
        BackendMismatchError: the cluster and the existing process group contradict each other.
        BackendNotAvailableError: the world could not be joined, or this process has no accelerator of its own.
        MeshError: two processes have one accelerator.
    """
    if dist.is_initialized():
        return _existing(cluster, device_type)
    place = placed(cluster, "`unidist run -n {count} script.py` or `torchrun --nproc-per-node {count} script.py`")
    count, index, launch = place.count, place.index, place.launch
    local_index = launch.local_index if launch else None if count == 1 else index
    device = accelerators.bind(device_type, local_index)
    if count > 1:
        by_environment = launch is not None and launch.launcher == "torchrun" and cluster.address is None
        _init("env://" if by_environment else f"tcp://{place.address}", count, index, device_type, cluster.timeout)
        try:
            accelerators.check_apart(device, index, count, world_store())
        except UnidistError:
            dist.destroy_process_group()
            raise
    return Membership(index, count, device, cluster.timeout, True)


def alone(world: Membership) -> None:
    """Gives a world of one process torch's process group, which native meshes need. Uses no network."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(accelerators.transports(world.device.type), store=store, rank=0, world_size=1)


def retimed(world: Membership, seconds: float) -> Membership:
    """The world with another timeout, which holds for its default group and for making new ones."""
    limit = timedelta(seconds=seconds)
    if dist.is_initialized():
        c10d._set_pg_timeout(limit)
    for store, _ in _stores.values():
        store.set_timeout(limit)
    return replace(world, timeout=seconds)


def _existing(cluster: Cluster, device_type: DeviceType) -> Membership:
    rank, size = dist.get_rank(), dist.get_world_size()
    remedy = ": leave the arguments out to use that, or destroy it first"
    check_same(cluster, rank, size, "torch.distributed was initialised", remedy)
    default = c10d._get_default_group()
    carries = c10d.BackendConfig(c10d.Backend(dist.get_backend_config(default))).get_device_backend_map()
    if device_type == "cuda" and carries.get("cuda") != "nccl" and not accelerators.goes_by_host():
        device_type = "cpu"
    device = _chosen(default) if device_type == "cuda" else torch.device("cpu")
    accelerators.check_apart(device, rank, size, world_store())
    return Membership(rank, size, device, cluster.timeout, False)


def _chosen(default: Any) -> torch.device:
    bound = default.bound_device_id
    device = torch.device("cuda", torch.cuda.current_device()) if bound is None else bound
    torch.cuda.set_device(device)
    return device


def world_store() -> Any:
    """The store of the default group."""
    return c10d._world.pg_map[c10d._get_default_group()][1]


def _init(method: str, count: int, index: int, device_type: DeviceType, timeout: float) -> None:
    limit = timedelta(seconds=timeout)
    try:
        store = _store(method, count, index, limit)
        kinds = accelerators.transports(device_type)
        with interrupting_nobody(accelerators.GLOOS_THREAD):
            dist.init_process_group(kinds, store=store, world_size=count, rank=index, timeout=limit)
            # Whoever left before all are in would take the others' connections down.
            dist.all_reduce(torch.zeros(1))
    except (RuntimeError, ValueError) as error:  # DistNetworkError, DistStoreError and gloo's own
        if dist.is_initialized():
            dist.destroy_process_group()
        raise BackendNotAvailableError(
            f"process {index} of {count} could not join the others through {method} within {timeout:g} s "
            f"({str(error).splitlines()[0]}): check that all {count} processes were started, that process 0's host and "
            "port can be reached from here, and that nothing else listens there"
        ) from error


def _store(method: str, count: int, index: int, limit: timedelta) -> Any:
    key = (method, count, index)
    if key not in _stores:
        store, _, _ = next(rendezvous(method, index, count, timeout=limit))
        _stores[key] = store, itertools.count()
    store, worlds = _stores[key]
    store.set_timeout(limit)
    return PrefixStore(f"unidist-{next(worlds)}", store)
