"""How costs grow: with ranks, with layers, with variables. On the simulator, of whose ranks one works at a time.

    python benchmarks/scaling.py [--ranks 1 2 4 8 16 32 64] [--layers 4 8 16 32 64] [--variables 100 1000 10000]
                                 [--world 8 64 512 1024]

Ranks: a step of a perceptron under each strategy. Its time over that on one device, the messages of a rank, and its
bytes in the unit in which they do not grow:

    data parallel, ZeRO    (n - 1) / n of the weights' bytes      2 is a reduce_scatter and an all_gather, or all_reduce
    tensor parallel        one all_reduce of the activations      one a pair of layers forward, and backward
    2-D                    both, on axes of half the ranks

Layers: the seconds that planning takes. Variables: those of `describe`, and of a ledger with as many events; the CPU
time of a step, a rank and variable. World: the CPU time of a step, a rank, where each has one row, and the memory of so
many ranks, each with a model of its own. CPU time hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

import unidist

os.environ.setdefault("KERAS_BACKEND", "torch")
unidist.use("sim", devices=1)

import keras  # noqa: E402
import torch  # noqa: E402

from unidist.events import Event  # noqa: E402
from unidist.tables import table  # noqa: E402

HIDDEN, WIDE, ROWS = 64, 256, 64
RULES = {r".*up_\d+/kernel": (None, "model"), r".*up_\d+/bias": ("model",), r".*down_\d+/kernel": ("model", None)}


def perceptron(pairs: int = 2) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((HIDDEN,))]
    for k in range(pairs):
        layers += [keras.layers.Dense(WIDE, "relu", name=f"up_{k}"), keras.layers.Dense(HIDDEN, name=f"down_{k}")]
    return keras.Sequential(layers)


def strategies(ranks: int) -> dict[str, Callable[[], Any]]:
    def by_model(**axes: int) -> Any:
        mesh = unidist.Mesh(axes)
        return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, RULES))

    found: dict[str, Callable[[], Any]] = {
        "data parallel": unidist.DataParallel,
        "ZeRO-1": lambda: unidist.DataParallel(zero=1),
        "ZeRO-3": lambda: unidist.DataParallel(zero=3),
        "tensor parallel": lambda: by_model(model=ranks),
    }
    if ranks >= 4:
        found["2-D"] = lambda: by_model(data=2, model=ranks // 2)
    return found


def seconds_of(call: Callable[[], object], times: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    took = []
    for _ in range(times):
        begun = clock()
        call()
        took.append(clock() - begun)
    return statistics.median(took)


def cpu_of_step(strategy: Any, make: Callable[[], keras.Model], x: Any) -> float:
    """Seconds of CPU time, of all ranks together."""
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    for _ in range(2):
        model.train_on_batch(x, x)
    return seconds_of(lambda: model.train_on_batch(x, x), 3, time.process_time)


def of_step(strategy: Any) -> tuple[float, int, float, int]:
    """(seconds, messages, bytes of a rank, bytes of the weights)."""
    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = np.ones((ROWS, HIDDEN), "float32"), np.ones((ROWS, HIDDEN), "float32")
    for _ in range(2):
        model.train_on_batch(x, y)
    with unidist.ledger() as sent:
        model.train_on_batch(x, y)
    weights = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    return seconds_of(lambda: model.train_on_batch(x, y)), sent.count(), float(sent.bytes()), weights


def by_ranks(counts: Sequence[int]) -> None:
    rows = [("ranks", "strategy", "time over one device", "messages", "bytes of a rank", "in units")]
    unidist.use("sim", devices=1)
    alone, *_ = of_step(unidist.DataParallel())
    for ranks in counts:
        unidist.use("sim", devices=ranks)
        for name, make in strategies(ranks).items():
            if ranks == 1 and name != "data parallel":
                continue
            seconds, messages, nbytes, weights = of_step(make())
            share = (ranks - 1) / ranks
            unit = 2 * share * ROWS * HIDDEN * 4 if name == "tensor parallel" else share * weights
            units = f"{nbytes / unit:.2f}" if unit and name != "2-D" else ""
            rows.append((str(ranks), name, f"{seconds / alone:.2f}", str(messages), f"{nbytes:,.0f}", units))
    print(table(rows, numbers=(0, 2, 3, 4, 5)))


def by_layers(counts: Sequence[int]) -> None:
    rows = [("layers", "seconds of planning", "milliseconds a layer")]
    unidist.use("sim", devices=4)
    for count in counts:
        model = perceptron(count // 2)
        mesh = unidist.Mesh({"model": 4})
        seconds = seconds_of(lambda: unidist.plan(model, mesh), 1)  # noqa: B023 (called here)
        rows.append((str(count), f"{seconds:.2f}", f"{seconds / count * 1e3:.1f}"))
    print(table(rows, numbers=(0, 1, 2)))


class Many(keras.layers.Layer):  # type: ignore[misc]
    """So many small variables, each used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def build(self, shape: Any) -> None:
        self.many = [self.add_weight(shape=(4,), name=f"w_{k}", initializer="zeros") for k in range(self.count)]

    def call(self, x: Any) -> Any:
        return x + keras.ops.sum(keras.ops.stack(self.many), 0)


def by_variables(counts: Sequence[int]) -> None:
    stages = (0, 1, 3)
    headings = [f"step, us of CPU, ZeRO-{zero}" if zero else "step, us of CPU" for zero in stages]
    rows = [("variables", "seconds of describe", "of a ledger's table", *headings)]
    x = np.ones((4, 4), "float32")
    for count in counts:
        keras.utils.clear_session()
        unidist.use("sim", devices=4)

        def make(count: int = count) -> keras.Model:
            return keras.Sequential([keras.Input((4,)), Many(count)])

        with unidist.DataParallel(zero=3).scope():
            model = make()
        described = seconds_of(lambda: unidist.describe(model).show(), 1)  # noqa: B023 (called here)
        events = [Event("all_reduce", ("data",), (0, 1, 2, 3), Fraction(24), f"w_{k}") for k in range(count)]
        shown = seconds_of(unidist.Ledger(events).show, 1)
        steps = [cpu_of_step(unidist.DataParallel(zero=zero), make, x) / (4 * count) for zero in stages]
        rows.append((str(count), f"{described:.2f}", f"{shown:.2f}", *(f"{seconds * 1e6:.0f}" for seconds in steps)))
    print(table(rows, numbers=tuple(range(len(rows[0])))))


def by_world(counts: Sequence[int]) -> None:
    rows = [("ranks", "step, ms of CPU a rank", "peak, MiB", "before")]
    for ranks in sorted(counts):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unidist.use("sim", devices=ranks)
        seconds = cpu_of_step(unidist.DataParallel(), perceptron, np.ones((ranks, HIDDEN), "float32"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append((str(ranks), f"{seconds / ranks * 1e3:.2f}", f"{peak / 1024:,.0f}", f"{before / 1024:,.0f}"))
    print(table(rows, numbers=(0, 1, 2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    parser.add_argument("--variables", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--world", type=int, nargs="*", default=[8, 64, 512, 1024])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    works = {by_ranks: asked.ranks, by_layers: asked.layers, by_variables: asked.variables, by_world: asked.world}
    for work, counts in works.items():
        if counts:
            work(counts)


if __name__ == "__main__":
    main()
