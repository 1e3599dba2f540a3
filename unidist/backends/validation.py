"""Compares what is given to an adapter with what it takes: dtypes, shapes, numbers of shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unidist.algebra import Mesh, Sharding
from unidist.backends.protocol import DistributionBackend, dtype_name
from unidist.errors import CapabilityError, LayoutError, MeshError


def check_dtype(backend: DistributionBackend, dtype: str, hint: str = "") -> None:
    """Raises CapabilityError where the adapter does not move a dtype. `hint` helps besides a cast."""
    known = backend.capabilities.dtypes
    if dtype not in known:
        raise CapabilityError(
            f"backend {backend.name!r} cannot move {dtype} arrays: cast to one of {sorted(known)}{hint}"
        )


def check_ranks(mesh: Mesh, name: str, count: int, remedy: str) -> None:
    """Raises MeshError where a mesh names a rank beyond the `count` of an adapter's world. See `too_few`."""
    needed = max(mesh.devices) + 1
    if needed > count:
        raise too_few(str(mesh), needed, name, count, remedy)


def too_few(asked: str, needed: int, name: str, count: int, remedy: str) -> MeshError:
    """Returns the error of a world that has not the devices that were asked for.

    `remedy` says what helps, with {needed} for the number of devices.
    """
    return MeshError(f"{asked} needs {needed} devices, and {name} has {count}: {remedy.format(needed=needed)}")


def check_one_dtype(shards: Iterable[Any]) -> None:
    """Raises LayoutError where the shards of one array have several dtypes."""
    kinds = {dtype_name(shard) for shard in shards}
    if len(kinds) > 1:
        raise LayoutError(f"the shards of one array have dtypes {sorted(kinds)}: cast them to one")


def check_whole_shape(found: tuple[int, ...], sharding: Sharding) -> None:
    """Raises LayoutError where a full value has not the sharding's shape."""
    if found != sharding.shape:
        raise LayoutError(f"the value has shape {found}, the sharding {sharding.shape}")


def check_count(shards: Sequence[Any], ranks: Sequence[int]) -> None:
    """Raises LayoutError where there is not one shard for each rank of this process."""
    if len(shards) != len(ranks):
        raise LayoutError(f"this process holds ranks {ranks}: give {len(ranks)} shards, found {len(shards)}")


def check_local_shape(found: tuple[int, ...], sharding: Sharding, rank: int) -> None:
    """Raises LayoutError where a shard has not the shape that its rank holds under the sharding."""
    wanted = sharding.local_shape(rank)
    if found != wanted:
        raise LayoutError(
            f"rank {rank} gave a shard of shape {found}, but under {sharding.layout} on {sharding.mesh} "
            f"a tensor of shape {sharding.shape} has shape {wanted} there"
        )


def check_data_shape(found: tuple[int, ...], wanted: tuple[int, ...], sharding: Sharding) -> None:
    """Raises LayoutError where a global array has not the shape of its data under the sharding."""
    if found != wanted:
        raise LayoutError(
            f"the data has shape {found}, but that of a tensor of shape {sharding.shape} under "
            f"{sharding.layout} on {sharding.mesh} has {wanted}"
        )
