"""What simulating costs: 8, 64 and 512 virtual ranks against one device, on the same total batch.

A small network is trained by hand, data-parallel: each rank computes its rows, all-reduces one flat gradient and
updates its own replica. Printed for each number of ranks: the fastest step, its ratio to one device, and what handing
over costs. Compared with one device at the end, so that nothing fast is wrong.

    python benchmarks/sim_ranks.py --ranks 8 64 512 --batch 2048 --width 128 --steps 10
"""

from __future__ import annotations

import argparse
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


def one_device(x: torch.Tensor, y: torch.Tensor, width: int, steps: int) -> tuple[float, torch.Tensor]:
    net = Net(width)
    times = [_timed(lambda: net.step(x, y, len(x), lambda gradient: None)) for _ in range(steps)]
    return min(times), net.values


def simulated(x: torch.Tensor, y: torch.Tensor, width: int, steps: int, ranks: int) -> tuple[float, torch.Tensor]:
    backend, everyone = VirtualRanks(VirtualWorld(ranks)), tuple(range(ranks))
    parts, wanted = x.tensor_split(ranks), y.tensor_split(ranks)
    nets = [Net(width) for _ in everyone]

    def step(rank: int) -> None:
        def reduce(gradient: torch.Tensor) -> None:
            backend.comm.all_reduce_inplace(gradient, Group(everyone, rank), "sum").wait()

        nets[rank].step(parts[rank], wanted[rank], len(x), reduce)

    times = [_timed(lambda: backend.run(step)) for _ in range(steps)]
    backend.shutdown()
    if not all(torch.equal(net.values, nets[0].values) for net in nets):
        raise SystemExit(f"{ranks} ranks: the replicas differ")
    return min(times), nets[0].values


def hand_over(ranks: int) -> float:
    """Seconds from one rank to the next, in a collective that does nothing."""
    world, everyone = VirtualWorld(ranks), tuple(range(ranks))
    count = max(4, 4096 // ranks)

    def fn(rank: int) -> None:
        for _ in range(count):
            world.exchange(everyone, "nothing", None, lambda values: values)

    world.run(fn)
    seconds = min(_timed(lambda: world.run(fn)) for _ in range(3))
    world.close()
    return seconds / (count * ranks)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(given.batch, given.width, generator=generator)
    y = torch.tanh(x.sum(1, keepdim=True))
    alone, right = one_device(x, y, given.width, given.steps)
    print(f"batch {given.batch}, width {given.width}: one device {alone * 1e3:.2f} ms a step")
    for ranks in given.ranks:
        seconds, found = simulated(x, y, given.width, given.steps, ranks)
        error = (found - right).abs().max().item()
        print(
            f"{ranks:4} ranks: {seconds * 1e3:8.2f} ms a step, {seconds / alone:6.2f} x one device, "
            f"{hand_over(ranks) * 1e6:5.1f} us a hand-over, largest difference {error:.1e}"
        )
        if error > 1e-5:
            raise SystemExit(f"{ranks} ranks differ from one device by {error}")


if __name__ == "__main__":
    main()
