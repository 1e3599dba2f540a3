"""Transports: the process groups of torch.distributed behind the groups of a mesh."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unidist.algebra import Group
from unidist.backends import noting
from unidist.backends.noting import noted
from unidist.backends.torch import accelerators
from unidist.backends.torch.calls import Calls
from unidist.backends.torch.lost import told
from unidist.backends.turns import interrupting_nobody

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """One process group, seen from this process.

    Its members are numbered by their places in the mesh's group.

    Attributes:
        pg: the process group.
        name: its name, by which functional collectives know it.
        ranks: the ranks of the places, in order.
        index: this process's place.
        is_gloo: whether CPU tensors go over gloo.
        goes_by_host: whether tensors of other devices go over the host, and gloo.
        limit: how long a message waits now.
        calls: the calls on this transport, which every member numbers alike.
        messages: what carries messages of CPU tensors: gloo itself, where torch's dispatcher would choose it each time.
        size: how many places there are.
    """

    pg: dist.ProcessGroup
    name: str
    ranks: tuple[int, ...]
    index: int
    is_gloo: bool
    goes_by_host: bool
    limit: Callable[[], timedelta]
    calls: Calls = field(default_factory=Calls)
    messages: Any = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", self.pg._get_backend(_CPU) if self.is_gloo else self.pg)
        object.__setattr__(self, "size", len(self.ranks))


class Transports:
    """The process groups made so far, by their ranks in order. They live as long as the default group.

    A group is made when a collective first needs it, by its members alone: all of them come there at the same point
    of the program, as they do for the collective itself. So a mesh of some of the ranks is no special case.

    torch.distributed.new_group does not serve here. It sorts the ranks (before torch 2.13 always), and the name under
    which members meet without the others holds the number of groups that a process has made, which differs between
    the ranks where meshes cover different ones. Here the name has the ranks in their order and nothing else.

    What unidist itself says to others (agreement, numbers, names) are CPU tensors: where the default group was made by
    someone else for CUDA tensors alone, as init_process_group("nccl") does, the world gets a group of ours, with gloo.

    Args:
        timeout: seconds that a collective waits for its members.

    Attributes:
        made: those made so far, by the ranks of their places.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self.made: dict[tuple[int, ...], Transport] = {}
        self._lock = threading.Lock()

    @property
    def timeout(self) -> float:
        """Seconds that a collective waits for its members."""
        return self._timeout.total_seconds()

    def set_timeout(self, seconds: float) -> None:
        """Changes how long collectives wait, over groups that are made already too."""
        self._timeout = timedelta(seconds=seconds)
        for transport in self.made.values():
            c10d._set_pg_timeout(self._timeout, transport.pg)

    def __iter__(self) -> Iterator[Transport]:
        """Yields the transports made so far."""
        return iter(tuple(self.made.values()))

    def __call__(self, group: Group, meet: Callable[[], None] = lambda: None) -> Transport:
        """Returns the transport of a group.

        `meet` is called before a new process group is made: the others may not come.
        """
        transport = self.made.get(group.ranks)
        if transport is None:
            with self._lock:  # a gradient's thread may come here too
                transport = self.made.get(group.ranks)
                if transport is None:
                    transport = self.made[group.ranks] = self._make(group, meet)
        return transport

    def _make(self, group: Group, meet: Callable[[], None]) -> Transport:
        default = c10d._get_default_group()
        if group.ranks == tuple(range(dist.get_world_size())) and "cpu" in _kinds(default):
            pg = default
        else:
            pg = self._found(group.ranks) or self._new(group, meet)
        kinds = _kinds(pg)
        is_gloo = kinds.get("cpu") == "gloo"
        by_host = is_gloo and kinds.get("cuda") != "nccl"
        return Transport(pg, pg.group_name, group.ranks, group.index, is_gloo, by_host, lambda: self._timeout)

    def _found(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A group that an earlier adapter left in a world that is not ours to end."""
        name = _name(ranks)
        return next((pg for pg, other in c10d._world.pg_names.items() if other == name), None)

    def _new(self, group: Group, meet: Callable[[], None]) -> dist.ProcessGroup:
        meet()
        default = c10d._get_default_group()
        backend, store = _with_gloo(_kinds(default)), c10d._world.pg_map[default][1]
        pg: dist.ProcessGroup
        making = "making the process group"
        with (
            noted(noting.told(making, group.ranks)),
            told(making, group.ranks),
            _by_members_alone(default),
            interrupting_nobody(accelerators.GLOOS_THREAD),
        ):
            pg, _ = c10d._new_process_group_helper(
                group.size,
                group.index,
                list(group.ranks),
                c10d.Backend(backend),
                store,
                _name(group.ranks),  # type: ignore[arg-type]  # a NewType of str
                timeout=self._timeout,
                group_desc="unidist",
            )
        c10d._world.pg_group_ranks[pg] = {rank: place for place, rank in enumerate(group.ranks)}
        return pg


def _kinds(pg: dist.ProcessGroup) -> Mapping[str, str]:
    return c10d.BackendConfig(c10d.Backend(dist.get_backend_config(pg))).get_device_backend_map()


def _with_gloo(kinds: Mapping[str, str]) -> str:
    return ",".join(f"{device}:{backend}" for device, backend in {"cpu": "gloo", **kinds}.items())


@contextlib.contextmanager
def _by_members_alone(default: Any) -> Iterator[None]:
    """Lets a group, inside, be made by its members alone.

    From a default group that is bound to a device, by `device_id=`, torch would split NCCL's communicator. All ranks of
    the world must do that together.
    """
    bound = default.bound_device_id
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _name(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return f"unidist-{hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()}"
