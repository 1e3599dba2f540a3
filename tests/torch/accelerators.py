"""What the processes of test_accelerators run, on machines without GPUs: what they see of CUDA is made up."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import unidist
from unidist.algebra import Mesh
from unidist.backends.torch import accelerators, comm


@contextmanager
def cuda(count: int = 2, *, uuid: str | None = None) -> Iterator[list[torch.device]]:
    """Inside there are so many GPUs, for who asks; what was made the current one. Nothing can be put there."""
    current: list[torch.device] = [torch.device("cuda", 0)]
    with ExitStack() as stack:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: current[-1].index,
            "set_device": current.append,
            "get_device_properties": lambda device: mock.Mock(uuid=uuid or f"0000-{device.index}"),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        yield current


def with_one_gpu() -> str:
    """What joining says, where every process sees the one GPU of the machine."""
    # There is no NCCL here.
    with cuda(1), mock.patch.object(accelerators, "transports", return_value="gloo"):
        try:
            unidist.use("torch")
        except unidist.MeshError as error:
            return str(error)
    return ""


def with_one_gpu_over_the_host() -> tuple[str, list[str]]:
    """(the device of this rank, all devices), where they are tried on one GPU."""
    with cuda(1):
        adapter = unidist.use("torch")
        return str(adapter.world.device), unidist.list_devices()  # type: ignore[attr-defined]


def with_a_group_for_gpus_alone() -> tuple[list[float], str, str]:
    """Sums of CPU tensors in a world whose group was made by the program, and carries CUDA tensors only."""
    dist.init_process_group("cuda:gloo")
    adapter: Any = unidist.use("torch", devices=["cpu:0", "cpu:1"])
    group = Mesh({"x": 2}).group("x", adapter.rank)
    x = torch.full((3,), adapter.rank + 1.0)
    whole = adapter.comm.all_reduce(x, group, "sum")
    adapter.comm.barrier(group)
    told = dist.get_backend_config(adapter.comm.transport(group).pg)
    unidist.shutdown()
    return whole.tolist(), told, dist.get_backend_config()


def with_a_bound_group() -> tuple[float, str]:
    """A sum in a group of one rank, of a world that the program has bound to a device."""
    dist.init_process_group("gloo")
    default: Any = c10d._get_default_group()
    default.bound_device_id = torch.device("cuda", dist.get_rank())
    adapter: Any = unidist.use("torch", devices=["cpu:0", "cpu:1"])
    split = AssertionError("all ranks of the world would have to split NCCL's communicator")
    with mock.patch.object(c10d, "_get_split_source", side_effect=split):
        adapter.comm.transport(Mesh({"x": 2}, [1, 0]).group("x", adapter.rank))
    group = Mesh({"x": 2}, [1, 0]).group("x", adapter.rank)
    return float(adapter.comm.all_reduce(torch.ones(()), group, "sum")), str(default.bound_device_id)


def with_devices_of_the_program() -> list[str]:
    """The device of a rank whose process group the program has made: that which it is bound to, else the current."""
    dist.init_process_group("cpu:gloo,cuda:gloo")
    default: Any = c10d._get_default_group()
    found = []
    with cuda(4) as current, mock.patch.dict("os.environ", {accelerators.TRANSPORT: "gloo"}):
        for bound, own in ((None, 3), (torch.device("cuda", 2), 0)):
            default.bound_device_id = bound
            current.append(torch.device("cuda", own))
            found.append(str(unidist.use("torch").world.device))  # type: ignore[attr-defined]
            unidist.shutdown()
    return found


def nowhere_near() -> None:
    """From here on no tensor is on the host for the collectives: they go the way of CUDA tensors without NCCL."""
    mock.patch.object(comm, "is_on_host", return_value=False).start()


class Queued:
    """Collectives as NCCL's are to the host: each is queued, and the program goes on at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def all_reduce(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self.found.append("all_reduce")
        return x

    def broadcast(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self.found.append("broadcast")
        return x


def disagree() -> tuple[str, list[str]]:
    """(the error, what was queued) of ranks that come to different collectives on the way of CUDA tensors over NCCL."""
    adapter: Any = unidist.use("torch")
    nowhere_near()
    group = Mesh({"x": 2}).group("x", adapter.rank)
    transport = adapter.comm.transport(group)
    object.__setattr__(transport, "goes_by_host", False)
    queued = adapter.comm._other = Queued()
    try:
        if adapter.rank:
            adapter.comm.all_reduce(torch.ones(3), group, "sum")
        else:
            adapter.comm.broadcast(torch.ones(3), group, 0)
    except unidist.DesyncError as error:
        return str(error), queued.found
    return "", queued.found


def move_buffers() -> list[Any]:
    """What is started on flat buffers, over the host."""
    adapter: Any = unidist.use("torch")
    nowhere_near()
    group, rank = Mesh({"x": 2}).group("x", adapter.rank), adapter.rank
    c = adapter.comm
    flat = torch.arange(4.0) * (rank + 1)
    c.all_reduce_inplace(flat, group, "mean").wait()
    part = torch.empty(2)
    given = torch.arange(4.0) + rank
    c.reduce_scatter_into(part, given, group, "sum").wait()
    whole = torch.full((4,), -1.0)
    whole[2 * rank : 2 * rank + 2] = rank + 1.0
    c.all_gather_into(whole, whole[2 * rank : 2 * rank + 2], group).wait()
    unidist.shutdown()
    return [np.asarray(x).tolist() for x in (flat, part, given, whole)]


def make_ready_and_end() -> tuple[int, int, bool, bool]:
    """(groups made before and after one is made ready, whether the end of the program and `shutdown` leave NCCL)."""
    zeros = torch.zeros
    with (
        cuda(2),
        mock.patch.object(accelerators, "transports", return_value="gloo"),
        mock.patch.object(atexit, "register") as registered,
        mock.patch.object(atexit, "unregister") as unregistered,
        mock.patch.object(torch, "zeros", lambda *shape, device=None, **how: zeros(*shape, **how)),
    ):
        adapter: Any = unidist.use("torch")
        before = len(list(adapter.comm.transport))
        adapter.ready(Mesh({"x": 2}, [1, 0]).group("x", adapter.rank))
        after = len(list(adapter.comm.transport))
        part = adapter._part
        unidist.shutdown()
    return before, after, mock.call(part) in registered.mock_calls, mock.call(part) in unregistered.mock_calls
