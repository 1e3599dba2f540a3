"""DistributedArray, how one is made, and the collectives on it."""

from unidist.array.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    permute,
    reduce_scatter,
    set_mesh_in_use,
)
from unidist.array.conversion import as_layout, as_mesh
from unidist.array.creation import distribute, from_local
from unidist.array.distributed_array import DistributedArray

__all__ = [
    "DistributedArray",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "as_layout",
    "as_mesh",
    "barrier",
    "broadcast",
    "distribute",
    "from_local",
    "permute",
    "reduce_scatter",
    "set_mesh_in_use",
]
