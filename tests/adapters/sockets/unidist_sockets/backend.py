"""Ranks are processes of one machine, and each two of them share a connection."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from multiprocessing import BufferTooShort
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import torch

from unidist.algebra import Group, Mesh, Sharding
from unidist.algebra.layout import ReduceOp
from unidist.backends.collectives import Done
from unidist.backends.environment import detect
from unidist.backends.local import LocalViewBackend
from unidist.backends.protocol import Capabilities, Cluster
from unidist.backends.torch.ops import TorchOps
from unidist.errors import BackendMismatchError, BackendNotAvailableError, DesyncError, ProcessLostError

Parts = Mapping[int, torch.Tensor]


def meet(address: str, count: int, index: int, timeout: float) -> dict[int, Connection]:
    """Rank -> the connection with it. Process 0 listens at the address, and sends to all where each listens."""
    host, _, port = address.rpartition(":")
    key = os.environ.get("UNIDIST_TOKEN", "no token").encode()
    with Listener((host, 0 if index else int(port)), backlog=count, authkey=key) as door:
        if index == 0:
            came = [door.accept() for _ in range(1, count)]
            found = {rank: (own, link) for link in came for rank, own in [json.loads(link.recv_bytes())]}
            for _, link in found.values():
                link.send_bytes(json.dumps({rank: own for rank, (own, _) in found.items()}).encode())
            return {rank: link for rank, (_, link) in found.items()}
        links = {0: _knock((host, int(port)), key, timeout)}
        links[0].send_bytes(json.dumps([index, door.address[1]]).encode())
        ports = json.loads(links[0].recv_bytes())
        for lower in range(1, index):
            links[lower] = Client((host, ports[str(lower)]), authkey=key)
            links[lower].send_bytes(json.dumps(index).encode())
        for _ in range(index + 1, count):
            link = door.accept()
            links[json.loads(link.recv_bytes())] = link
        return links


def _knock(place: tuple[str, int], key: bytes, timeout: float) -> Connection:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return Client(place, authkey=key)
        except ConnectionRefusedError as error:  # process 0 has not come yet
            if time.monotonic() > deadline:
                raise BackendNotAvailableError(f"nobody listened at {place} for {timeout:g} s") from error
            time.sleep(0.01)


_REDUCE = {"sum": torch.add, "mean": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


class SocketCollectives:
    """Collectives over one group of ranks: see `Collectives` in unidist/backends/collectives.py."""

    def __init__(self, rank: int, links: Mapping[int, Connection], timeout: float) -> None:
        self.rank, self.links, self.timeout = rank, links, timeout

    def exchange(self, group: Group, sent: Parts, came: Parts) -> None:
        """Sends sent[k] to place k, and fills came[k] with what place k sends here.

        Pairs of ranks take turns, in one order everywhere: nobody waits in a circle.
        """
        if group.index in came:
            came[group.index].copy_(sent[group.index])
        for rank, place in sorted((rank, place) for place, rank in enumerate(group.ranks) if rank != self.rank):
            for sends in (self.rank < rank, self.rank > rank):
                if sends and place in sent:
                    self._send(rank, sent[place])
                elif not sends and place in came:
                    self._receive(rank, came[place])

    def _send(self, rank: int, x: torch.Tensor) -> None:
        try:
            self.links[rank].send_bytes(_memory(x.detach().clone(memory_format=torch.contiguous_format)))
        except OSError as error:
            raise ProcessLostError(f"rank {rank} has gone") from error

    def _receive(self, rank: int, x: torch.Tensor) -> None:
        try:
            if not self.links[rank].poll(self.timeout):
                raise ProcessLostError(f"rank {rank} sent nothing for {self.timeout:g} s")
            fits = self.links[rank].recv_bytes_into(_memory(x)) == x.nbytes
        except BufferTooShort:
            fits = False
        except (EOFError, OSError) as error:
            raise ProcessLostError(f"rank {rank} has gone") from error
        if not fits:
            raise DesyncError(f"rank {rank} did not send the {x.nbytes} bytes of {tuple(x.shape)}", ranks=(rank,))

    def _from_all(self, group: Group, sent: Parts, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        parts = [sent[group.index].new_empty(tuple(shape)) for shape in shapes]
        self.exchange(group, sent, dict(enumerate(parts)))
        return parts

    def all_reduce(self, x: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        return _reduced(self._from_all(group, _to_all(x, group), [x.shape] * group.size), op)

    def all_gather(self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        shapes = [_resized(x, dim, size) for size in sizes]
        return torch.cat(self._from_all(group, _to_all(x, group), shapes), dim)

    def reduce_scatter(
        self, x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], op: ReduceOp
    ) -> torch.Tensor:
        sent = dict(enumerate(x.split(list(sizes), dim)))
        return _reduced(self._from_all(group, sent, [sent[group.index].shape] * group.size), op)

    def all_to_all(
        self,
        x: torch.Tensor,
        group: Group,
        split: int,
        split_sizes: Sequence[int],
        concat: int,
        concat_sizes: Sequence[int],
    ) -> torch.Tensor:
        sent = dict(enumerate(x.split(list(split_sizes), split)))
        shapes = [_resized(sent[group.index], concat, size) for size in concat_sizes]
        return torch.cat(self._from_all(group, sent, shapes), concat)

    def broadcast(self, x: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.exchange(group, _to_all(x, group) if group.index == root else {}, {root: out})
        return out

    def permute(self, x: torch.Tensor, group: Group, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        sent = {destination: x for source, destination in pairs if source == group.index}
        self.exchange(group, sent, {source: out for source, destination in pairs if destination == group.index})
        return out

    def barrier(self, group: Group) -> None:
        self.all_reduce(torch.zeros(1), group, "sum")

    # On buffers, for the gradients of Keras models. These are done when they return.

    def all_reduce_inplace(self, x: torch.Tensor, group: Group, op: ReduceOp) -> Done:
        x.copy_(self.all_reduce(x, group, op))
        return Done()

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, group: Group, op: ReduceOp) -> Done:
        out.copy_(self.reduce_scatter(x, group, 0, [out.shape[0]] * group.size, op))
        return Done()

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Done:
        out.copy_(self.all_gather(x, group, 0, [x.shape[0]] * group.size))
        return Done()


def _memory(x: torch.Tensor) -> Any:
    return x.reshape(-1).view(torch.uint8).numpy()


def _to_all(x: torch.Tensor, group: Group) -> Parts:
    return dict.fromkeys(range(group.size), x)


def _resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    return [size if k == dim % x.dim() else n for k, n in enumerate(x.shape)]


def _reduced(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total: torch.Tensor = reduce(_REDUCE[op], parts)
    return total / len(parts) if op == "mean" else total


class SocketsBackend(LocalViewBackend[torch.Tensor]):
    """Each process holds one rank's shards, as torch tensors on the CPU."""

    name: ClassVar[str] = "sockets"
    capabilities: ClassVar[Capabilities] = Capabilities(view="local")
    comm: SocketCollectives

    def __init__(self, devices: int | Sequence[str] | None = None) -> None:
        self.ops = TorchOps()
        self._enter(1, 0, {})

    def _enter(self, count: int, index: int, links: Mapping[int, Connection], timeout: float = 0.0) -> None:
        self._count, self._index = count, index
        self.comm = SocketCollectives(index, links, timeout)

    def initialize(self, cluster: Cluster) -> None:
        if self._count > 1:
            raise BackendMismatchError(f"this is process {self._index} of {self._count} already")
        found = detect()
        if found is None or found.address is None:
            raise BackendNotAvailableError("start the script with `unidist run --backend sockets -n 2 script.py`")
        links = meet(found.address, found.process_count, found.process_index, cluster.timeout)
        self._enter(found.process_count, found.process_index, links, cluster.timeout)

    def shutdown(self) -> None:
        for link in self.comm.links.values():
            link.close()
        self._enter(1, 0, {})

    def set_timeout(self, seconds: float) -> None:
        self.comm.timeout = seconds

    @property
    def rank(self) -> int:
        return self._index

    def process_index(self) -> int:
        return self._index

    def process_count(self) -> int:
        return self._count

    def list_devices(self, kind: str | None = None) -> list[str]:
        return [f"cpu:{k}" for k in range(self._count)] if kind in (None, "cpu") else []

    def mesh(self, mesh: Mesh) -> Mesh:
        self.check_mesh(mesh)
        return mesh

    def layout(self, sharding: Sharding) -> Sharding:
        return sharding
