"""What the processes of test_nccl.py run, most of them in a world of one, which NCCL runs as any other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unidist
from tests.gpu.device import DEVICE, NAME, ON_GPU, address, instead_of_nccl, pause
from tests.torch.accelerators import nowhere_near
from unidist.algebra import Group, Mesh
from unidist.backends.protocol import ALL_DTYPES
from unidist.backends.torch.comm import TorchComm
from unidist.backends.torch.lost import told
from unidist.backends.torch.primitives import all_gather_single, reduce_scatter_single
from unidist.backends.torch.transports import Transport, Transports
from unidist.errors import ProcessLostError


def call_nccl() -> list[str]:
    """Each primitive on each dtype in a group of one rank, which NCCL runs as any other: what did not come back."""
    from unidist.backends.torch.buffers import BufferedCollectives
    from unidist.backends.torch.primitives import Eager

    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", init_method=address(), rank=0, world_size=1)
    adapter: Any = unidist.use("torch", devices=[NAME])
    transport = adapter.comm.transport(Mesh({"x": 1}).group("x", 0))
    ways = BufferedCollectives(Eager())
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: ways.all_reduce(x, transport, "sum"),
        "max": lambda x: ways.all_reduce(x, transport, "max"),
        "all_gather": lambda x: ways.all_gather(x, transport, 0, [4]),
        "reduce_scatter": lambda x: ways.reduce_scatter(x, transport, 0, [4], "sum"),
        "all_to_all": lambda x: ways.all_to_all(x, transport, 0, [4], 1, [3]),
        "broadcast": lambda x: ways.broadcast(x, transport, 0),
    }
    wrong = []
    for dtype in sorted(ALL_DTYPES):
        x = (torch.arange(12).view(4, 3) % 2).to(getattr(torch, dtype)).to(DEVICE)
        for name, call in calls.items():
            found = call(x)
            if found.dtype != x.dtype or found.device != x.device or not torch.equal(found.cpu(), x.cpu()):
                wrong.append(f"{name} of {dtype}")
    adapter.comm.barrier(transport_group := Mesh({"x": 1}).group("x", 0))
    assert transport_group.size == 1
    unidist.shutdown()
    dist.destroy_process_group()
    return wrong


def join_a_group_of_nccl_alone() -> tuple[str, float]:
    """(what carries tensors, a sum of CPU tensors) where the program has made a group for CUDA tensors, bound to its
    device."""
    device = torch.device("cuda", 0)
    options: Any = {"device_id": device} if ON_GPU else {}
    kinds = "nccl" if ON_GPU else "cuda:gloo"
    dist.init_process_group(kinds, init_method=address(), rank=0, world_size=1, **options)
    adapter: Any = unidist.use("torch", devices=[NAME])
    transport = adapter.comm.transport(Mesh({"x": 1}).group("x", 0))
    x = torch.ones(3)
    transport.pg.allreduce([x]).wait()
    unidist.shutdown()
    found = dist.get_backend_config(transport.pg)
    dist.destroy_process_group()
    return found, float(x.sum())


# handles --------------------------------------------------------------------------------------------------------------


class _One(int):
    """A one that is equal to nothing: a collective of one rank is sent all the same."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _group() -> Group:
    found = Group((0,), 0)
    object.__setattr__(found, "size", _One(1))
    return found


@contextmanager
def _world_of_one() -> Iterator[tuple[TorchComm, TorchComm]]:
    """The collectives of two groups, each with a communicator of its own."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", init_method=address(), rank=0, world_size=1)
    adapter: Any = unidist.use("torch", devices=[NAME])
    if not ON_GPU:
        instead_of_nccl()
        nowhere_near()
    adapter.comm.transport(_group())
    second = Transports(60.0)
    pg = second._new(Group((0,), 0), lambda: None)
    second.made[0,] = Transport(pg, pg.group_name, (0,), 0, True, False, lambda: timedelta(seconds=60))
    try:
        yield adapter.comm, TorchComm(second)
    finally:
        unidist.shutdown()
        dist.destroy_process_group()


Started = tuple[Any, Callable[[], torch.Tensor], torch.Tensor]


def _start(comm: TorchComm, kind: str, x: torch.Tensor) -> Started:
    """(handle, what gives its result, the result that is wanted) of a collective that is on its way."""
    group, wanted = _group(), x.clone()
    if kind in ("sum", "max", "mean"):
        return comm.all_reduce_inplace(x, group, kind), lambda: x, wanted  # type: ignore[arg-type]
    out = torch.zeros_like(x)
    if kind == "all_gather":
        return comm.all_gather_into(out, x, group), lambda: out, wanted
    return comm.reduce_scatter_into(out, x, group, "sum"), lambda: out, wanted


KINDS = ("sum", "max", "all_gather", "reduce_scatter")


def handles() -> tuple[list[str], int]:
    """(what did not come back, how many there were): each collective under way on each dtype, while the stream is held
    up before it."""
    wrong, count = [], 0
    with _world_of_one() as (comm, _):
        for dtype in sorted(ALL_DTYPES):
            for kind in (*KINDS, *(["mean"] if "float" in dtype else [])):
                pause(0.001)
                x = (torch.arange(4096, device=DEVICE).view(64, 64) % 2).to(getattr(torch, dtype))
                handle, result, wanted = _start(comm, kind, x)
                handle.wait()
                handle.wait()
                count += 1
                if result().dtype != wanted.dtype or not torch.equal(result().cpu(), wanted.cpu()):
                    wrong.append(f"{kind} of {dtype}")
    return wrong, count


def two_groups(rounds: int = 30) -> tuple[int, int, bool]:
    """(results that are wrong, of how many, whether the groups have communicators of their own): collectives of both
    are under way at once, and are waited for in another order than they were started in."""
    draw = random.Random(3)
    wrong = count = 0
    with _world_of_one() as comms:
        own = comms[0].transport(_group()).pg is not comms[1].transport(_group()).pg
        for turn in range(rounds):
            started = []
            for k in range(8):
                if draw.random() < 0.3:
                    pause(0.001)
                x = torch.arange(1 << draw.randrange(4, 16), device=DEVICE).view(-1, 4).float() + turn + k
                started.append(_start(comms[draw.randrange(2)], draw.choice(KINDS), x))
            draw.shuffle(started)
            for handle, result, wanted in started:
                handle.wait()
                count += 1
                wrong += not torch.equal(result(), wanted)
    return wrong, count, own


# errors ---------------------------------------------------------------------------------------------------------------


def mistakes() -> dict[str, tuple[str, bool]]:
    """What mistakes in arguments raise behind a collective's call: (type, whether it is a loss). In a group that
    carries the device's tensors alone."""
    options: Any = {"device_id": torch.device("cuda", 0)} if ON_GPU else {}
    kinds = "nccl" if ON_GPU else "cuda:gloo"
    dist.init_process_group(kinds, init_method=address(), rank=0, world_size=1, **options)
    pg: Any = dist.group.WORLD
    x = torch.ones(4, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "a tensor of the host": lambda: pg.allreduce([torch.ones(4)]).wait(),
        "parts that do not fit": lambda: all_gather_single(x.new_empty(7), x, group=pg),
        "another dtype": lambda: reduce_scatter_single(x.double(), x, group=pg),
        "splits that do not fit": lambda: dist.all_to_all_single(x.clone(), x, [3], [3], group=pg),
        "no tensor": lambda: pg.allreduce([]).wait(),
        "a root that is not there": lambda: dist.broadcast(x, group=pg, group_src=3),
    }
    found = {name: _raised(call) for name, call in calls.items()}
    dist.destroy_process_group()
    return found


def _raised(call: Callable[[], object]) -> tuple[str, bool]:
    try:
        with told("a collective", (0,)):
            call()
    except Exception as error:
        return type(error).__name__, isinstance(error, ProcessLostError)
    return "", False


def two_ranks_on_one_gpu() -> tuple[str, bool]:
    """What NCCL itself says of that."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(0)
    return _raised(lambda: (dist.all_reduce(torch.ones(4, device="cuda")), torch.cuda.synchronize()))
