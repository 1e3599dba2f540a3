"""What simulating costs: 8, 64 and 512 virtual ranks against one device, on the same total batch.

A small network is trained by hand, data-parallel: each rank computes its rows, all-reduces one flat gradient and
updates its own replica. Printed for each number of ranks: a step's ratio to one device's; that of the ranks' own work,
one after the other without the simulator, below which it cannot come; and what handing over costs. Ratios are medians
of steps that take turns, by the clock and of CPU time; torch has one thread throughout, for one rank works at a time.
Compared with one device at the end, so that nothing fast is wrong.

    python benchmarks/sim_ranks.py --ranks 8 64 512 --batch 2048 --width 128 --steps 11
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from unidist.algebra import Group
from unidist.backends.sim.ranks import VirtualRanks
from unidist.backends.sim.world import VirtualWorld

RATE = 0.01


class Net:
    """Three dense layers whose parameters and gradients are views of one buffer each."""

    def __init__(self, width: int) -> None:
        shapes = [(width, width), (width,), (width, width), (width,), (width, 1), (1,)]
        generator = torch.Generator().manual_seed(0)
        count = sum(torch.Size(shape).numel() for shape in shapes)
        self.values = torch.randn(count, generator=generator) / width**0.5
        self.gradient = torch.zeros(count)
        self.parameters = []
        start = 0
        for shape in shapes:
            stop = start + torch.Size(shape).numel()
            parameter = self.values[start:stop].view(shape).requires_grad_()
            parameter.grad = self.gradient[start:stop].view(shape)
            self.parameters.append(parameter)
            start = stop

    def step(self, x: torch.Tensor, y: torch.Tensor, total: int, reduce: Callable[[torch.Tensor], Any]) -> None:
        self.gradient.zero_()
        hidden = x
        for k in (0, 2):
            hidden = torch.relu(torch.addmm(self.parameters[k + 1], hidden, self.parameters[k]))
        out = torch.addmm(self.parameters[5], hidden, self.parameters[4])
        (((out - y) ** 2).sum() / total).backward()
        reduce(self.gradient)
        self.values.add_(self.gradient, alpha=-RATE)


class Ranks:
    """The same training as one device's, on so many virtual ranks, each with its rows and its replica."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, width: int, ranks: int) -> None:
        self.backend, self.everyone = VirtualRanks(VirtualWorld(ranks)), tuple(range(ranks))
        self.parts, self.wanted, self.total = x.tensor_split(ranks), y.tensor_split(ranks), len(x)
        self.nets = [Net(width) for _ in self.everyone]
        self.unreduced = [Net(width) for _ in self.everyone]

    def step(self) -> None:
        self.backend.run(self._on_rank)

    def _on_rank(self, rank: int) -> None:
        def reduce(gradient: torch.Tensor) -> None:
            self.backend.comm.all_reduce_inplace(gradient, Group(self.everyone, rank), "sum").wait()

        self.nets[rank].step(self.parts[rank], self.wanted[rank], self.total, reduce)

    def by_turns(self) -> None:
        """The ranks' own work and nothing else: no simulator, no thread, nothing reduced."""
        for net, x, y in zip(self.unreduced, self.parts, self.wanted, strict=True):
            net.step(x, y, self.total, lambda gradient: None)


def compare(x: torch.Tensor, y: torch.Tensor, width: int, steps: int, ranks: int) -> None:
    net, many = Net(width), Ranks(x, y, width, ranks)
    calls = {
        "one": lambda: net.step(x, y, len(x), lambda gradient: None),
        "simulated": many.step,
        "by turns": many.by_turns,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(steps):  # each is hit alike by what else the machine does
        for name, call in calls.items():
            call()  # the caches are another's
            found[name].append(_timed(call))
    many.backend.shutdown()
    if not all(torch.equal(one.values, many.nets[0].values) for one in many.nets):
        raise SystemExit(f"{ranks} ranks: the replicas differ")
    print(f"{ranks:4} ranks: {statistics.median(wall for wall, _ in found['simulated']) * 1e3:8.2f} ms a step,", end="")
    for name in ("simulated", "by turns"):
        wall, cpu = ([a[k] / b[k] for a, b in zip(found[name], found["one"], strict=True)] for k in range(2))
        print(f" {name} {statistics.median(wall):6.2f} x one device (CPU {statistics.median(cpu):6.2f}),", end="")
    error = (many.nets[0].values - net.values).abs().max().item()
    print(f" {hand_over(ranks) * 1e6:5.1f} us a hand-over, largest difference {error:.1e}")
    if error > 1e-5:
        raise SystemExit(f"{ranks} ranks differ from one device by {error}")


def hand_over(ranks: int) -> float:
    """Seconds from one rank to the next, in a collective that does nothing."""
    world, everyone = VirtualWorld(ranks), tuple(range(ranks))
    count = max(4, 4096 // ranks)

    def fn(rank: int) -> None:
        for _ in range(count):
            world.exchange(everyone, "nothing", None, lambda values: values)

    world.run(fn)
    seconds, _ = min(_timed(lambda: world.run(fn)) for _ in range(3))
    world.close()
    return seconds / (count * ranks)


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time of all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=11)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(given.batch, given.width, generator=generator)
    y = torch.tanh(x.sum(1, keepdim=True))
    for ranks in given.ranks:
        compare(x, y, given.width, given.steps, ranks)


if __name__ == "__main__":
    main()
