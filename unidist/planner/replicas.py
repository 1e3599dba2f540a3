"""Compares ZeRO over all data axes with ZeRO over some, whose shards have replicas along the others.

A node stands for the devices that have one place along the replicas' axes. Bytes are those of rings: of a collective's
ranks each sends to the next one in the order of the mesh.

Source: Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, for shards within a node (HSDP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from unidist.algebra import Axes, Mesh
from unidist.events import Event
from unidist.ledger import Ledger
from unidist.strategies import Strategy

# Of a strategy: bytes of values, gradients and slots on a device, and what a step sends.
Laid = Callable[[Strategy], tuple[int, Ledger]]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Says what replicas of shards cost, and what they save.

    Attributes:
        shard_axes: over which ZeRO cuts, or would. replica_axes: along which shards have replicas.
        is_used: the strategy has them; else they are offered.
        devices: of a node.
        within, across: bytes that a node's devices send in a step to each other, and out of the node.
        across_of_one: bytes that leave a node where ZeRO cuts over all data axes.
        more_held: bytes that a device holds more than with these.
        are_neighbours: a node's devices follow each other in the mesh.
    """

    shard_axes: Axes
    replica_axes: Axes
    is_used: bool
    devices: int
    within: int
    across: int
    across_of_one: int
    more_held: int
    are_neighbours: bool

    @property
    def in_words(self) -> str:
        """Says when they pay."""
        over, along = " and ".join(self.shard_axes), " and ".join(self.replica_axes)
        name = repr(self.shard_axes[0] if len(self.shard_axes) == 1 else self.shard_axes)
        kept = f"{self.within:,} bytes of a step stay within a node of {self.devices} devices, {self.across:,} leave it"
        if self.is_used:
            said = (
                f"ZeRO over {over}, replicas along {along}: {kept}; {self.across_of_one:,} would leave it if ZeRO cut "
                f"over all data axes. Each device holds {self.more_held:,} bytes more for it."
            )
        else:
            said = (
                f"ZeRO over all data axes: {self.across_of_one:,} bytes of a step leave a node. With shard_axis={name} "
                f"{kept}, and each device holds {self.more_held:,} bytes more."
            )
        pays = " Replicas pay where links between nodes are the slow ones and that memory is free."
        last = "" if self.are_neighbours else f" Put {name} last in the mesh: a node's devices are then neighbours."
        return said + pays + last


def compared(strategy: Strategy, laid: Laid) -> Replicas | None:
    """Returns the comparison for a strategy; None where it cuts over no data axes, or there is but one."""
    mesh = strategy.mesh
    wide = tuple(axis for axis in strategy.data_axes if mesh.axis_size(axis) > 1)
    named = tuple(axis for axis in wide if axis in mesh.check_axes(strategy.shard_axes))
    if not strategy.zero or len(wide) < 2 or not named:
        return None
    is_used = named != wide
    shards = named if is_used else wide[-1:]
    along = tuple(axis for axis in wide if axis not in shards)
    held, sent = laid(replace(strategy, shard_axes=shards))
    held_of_one, sent_of_one = laid(replace(strategy, shard_axes=None))
    across, across_of_one = _across(sent, mesh, along), _across(sent_of_one, mesh, along)
    node = _node(mesh, along)
    within = len(node) * sum(event.bytes for event in sent.events) - across
    names = mesh.axis_names
    return Replicas(
        shard_axes=shards,
        replica_axes=along,
        is_used=is_used,
        devices=len(node),
        within=round(within),
        across=round(across),
        across_of_one=round(across_of_one),
        more_held=held - held_of_one,
        are_neighbours=max(map(names.index, along)) < min(map(names.index, shards)),
    )


def _node(mesh: Mesh, along: Axes) -> frozenset[int]:
    """Returns the ranks that have the first device's place along some axes."""
    rest = tuple(axis for axis in mesh.axis_names if axis not in along)
    return frozenset(mesh.group(rest, mesh.devices[0]).ranks) if rest else frozenset(mesh.devices[:1])


def _across(sent: Ledger, mesh: Mesh, along: Axes) -> Fraction:
    """Returns the bytes that leave the first device's node, of all its devices."""
    node = _node(mesh, along)
    return sum((event.bytes * _leaving(event, node) for event in sent.events), Fraction(0))


def _leaving(event: Event, node: frozenset[int]) -> Fraction:
    """Returns how many devices of a node send out of it, in all groups like that of a collective."""
    ranks = event.ranks
    inside = [k for k, rank in enumerate(ranks) if rank in node]
    if event.op == "all_to_all":  # each to each
        out = Fraction(len(inside) * (len(ranks) - len(inside)), len(ranks) - 1)
    else:
        out = Fraction(sum(ranks[(k + 1) % len(ranks)] not in node for k in inside))
    return out * len(node) / len(inside)
