"""Our collectives on CPU tensors over gloo against torch.distributed's own: paired, in one process group.

    python benchmarks/collectives_torch.py [--processes 2 4] [--sizes 64 65536 1048576 8388608] [--pairs 30]

Each line is a collective and a size in bytes (of the full tensor): the first deciles of both, and their ratio. The two
take turns, so other load falls on both; the first decile is what is left of it where there are more processes than
cores. The last line is what our Python adds to one call:
redistribute P -> I of eight floats against clone and dist.all_reduce, over a process group that sends nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import unidist
from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.torch.backend import TorchBackend
from unidist.backends.torch.buffers import BufferedCollectives
from unidist.backends.torch.comm import TorchComm
from unidist.backends.torch.primitives import Eager, all_gather_single, reduce_scatter_single
from unidist.testing.processes import ProcessWorld

NAME = Path(__file__).stem
Row = tuple[str, int, float, float, float]
Pair = tuple[Callable[[], object], Callable[[], object]]


def join() -> None:
    unidist.use("torch")


def backend() -> TorchBackend:
    return unidist.backend()  # type: ignore[return-value]


def paired(pair: Pair, count: int) -> tuple[float, float, float]:
    """Seconds of ours and of theirs (first decile), and the ratio, over `count` turns after two to warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(count + 2):
        for k, call in enumerate(pair):
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn > 1:
                times[k].append(time.perf_counter() - start)
    ours, theirs = (statistics.quantiles(values, n=10)[0] for values in times)
    return ours, theirs, ours / theirs


def pairs_of(elements: int) -> Iterator[tuple[str, Pair]]:
    """(what, (ours, theirs)) for a full tensor of so many floats."""
    mesh = Mesh({"x": -1})
    group = mesh.group("x", backend().rank)
    n, comm, theirs = group.size, backend().comm, TorchComm(backend().comm.transport, BufferedCollectives(Eager()))
    x, part = torch.ones(elements), torch.ones(elements // n)
    sizes = (elements // n,) * n
    square = torch.ones(n, elements // n)

    def native_reduce_scatter() -> None:
        reduce_scatter_single(torch.empty_like(part), x.clone())

    def native_all_to_all() -> None:
        dist.all_to_all_single(torch.empty_like(x), x)

    yield "all_reduce", (lambda: comm.all_reduce(x, group, "sum"), lambda: dist.all_reduce(x.clone()))
    yield "reduce_scatter", (lambda: comm.reduce_scatter(x, group, 0, sizes, "sum"), native_reduce_scatter)
    yield (
        "reduce_scatter against all_reduce",
        (lambda: comm.reduce_scatter(x, group, 0, sizes, "sum"), lambda: dist.all_reduce(x.clone())),
    )
    yield (
        "all_gather",
        (
            lambda: comm.all_gather(part, group, 0, sizes),
            lambda: all_gather_single(torch.empty_like(x), part),
        ),
    )
    yield (
        "all_to_all",
        (lambda: comm.all_to_all(x, group, 0, sizes, 0, sizes), native_all_to_all),
    )
    yield (
        "all_to_all of columns",
        (
            lambda: comm.all_to_all(square, group, 1, _even(elements // n, n), 0, (n,) * n),
            lambda: theirs.all_to_all(square, group, 1, _even(elements // n, n), 0, (n,) * n),
        ),
    )


def _even(size: int, parts: int) -> tuple[int, ...]:
    step = -(-size // parts)
    bounds = [min(k * step, size) for k in range(parts + 1)]
    return tuple(b - a for a, b in itertools.pairwise(bounds))


def measure(sizes: list[int], count: int) -> list[Row]:
    rows = []
    for size in sizes:
        for what, pair in pairs_of(size // 4):
            rows.append((what, size, *paired(pair, count if size < 1 << 24 else max(3, count // 4))))
    return rows


def python_cost(count: int = 2000) -> tuple[float, float]:
    """Median seconds of our redistribute P -> I and of clone and dist.all_reduce, over a process group that sends
    nothing: what is left is Python (and the allocation of the result)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    unidist.use("torch")
    mesh = Mesh({"x": 2})
    src = Sharding(mesh, Layout(partial="x"), (8,))
    dst, x, move = src.with_layout(Layout()), torch.ones(8), backend().redistribute
    move(x, src, dst)  # the world is joined
    # As over gloo.
    found = backend().comm.transport
    made = replace(found(mesh.group("x", 0)), is_gloo=True)
    found.made[made.ranks] = made
    return block(lambda: move(x, src, dst), lambda: dist.all_reduce(x.clone()), count)


def block(ours: Callable[[], object], theirs: Callable[[], object], count: int) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for k, call in enumerate((ours, theirs)):
            start = time.perf_counter()
            for _ in range(10):
                call()
            times[k].append((time.perf_counter() - start) / 10)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1 << 14, 1 << 16, 1 << 20, 1 << 23, 1 << 26])
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    for processes in options.processes:
        print(f"\n{processes} processes\n{'':36}{'bytes':>10}{'ours ms':>10}{'torch ms':>10}{'ratio':>8}")
        with ProcessWorld(processes, setup=f"{NAME}:join", timeout=1800) as world:
            for what, size, ours, theirs, ratio in world.call(f"{NAME}:measure", options.sizes, options.pairs)[0]:
                print(f"{what:36}{size:>10}{ours * 1e3:>10.3f}{theirs * 1e3:>10.3f}{ratio:>8.2f}")
    with ProcessWorld(1, launcher=None) as world:
        ((ours, theirs),) = world.call(f"{NAME}:python_cost")
    print(f"\nPython of one call: ours {ours * 1e6:.1f} us, torch.distributed {theirs * 1e6:.1f} us")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
