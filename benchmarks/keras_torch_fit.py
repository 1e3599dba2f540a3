"""Whole `fit` calls, reading data included, of an MLP 784-1024-1024-10 on two gloo processes. Run by hand:

    unidist run -n 2 benchmarks/keras_torch_fit.py

keras_torch.py compares single steps; here all that a user waits for is counted. Data parallel, 256 rows a rank: `fit`
by unidist, `fit` with the same Keras model inside DDP, and PyTorch by hand with DDP. Tensor parallel over 2, a
column-row pair, 256 rows: `fit` by unidist, and PyTorch by hand with `parallelize_module`. All in one process group
with one thread a process, taking turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import unidist

unidist.use("torch", devices=2)

import keras  # noqa: E402
from paired import report, seconds  # noqa: E402

ROWS, FEATURES, WIDTH, CLASSES = 256, 784, 1024, 10
RATE, MOMENTUM = 0.01, 0.9


def data(steps: int, rank: int | None) -> tuple[Any, Any]:
    """The rows of all steps; of one rank where a rank is given."""
    rng = np.random.default_rng(0 if rank is None else rank)
    rows = ROWS * steps
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=rows).astype("int64")


def keras_model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(WIDTH, activation="relu", name="up"),
            layers.Dense(WIDTH, name="down"),
            layers.Activation("relu", name="relu"),
            layers.Dense(CLASSES, name="head"),
        ],
        name="mlp",
    )


def compiled(model: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), loss)
    return model


def torch_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


class InsideDDP(keras.Model):  # type: ignore[misc]
    """A Keras model whose training step calls it through DDP; each process fits its own rows."""

    def __init__(self, network: Any) -> None:
        super().__init__(name="inside_ddp")
        object.__setattr__(self, "ddp", torch.nn.parallel.DistributedDataParallel(network))
        self.network = network

    def call(self, x: Any) -> Any:
        return self.ddp(x) if torch.is_grad_enabled() else self.network(x)


def fitting(model: Any, x: Any, y: Any, batch: int) -> Callable[[], None]:
    def run() -> None:
        model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)

    return run


def by_hand(model: torch.nn.Module, x: Any, y: Any) -> Callable[[], None]:
    """A PyTorch training loop over batches of ROWS."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    loss = torch.nn.CrossEntropyLoss()
    inputs, classes = torch.from_numpy(x).split(ROWS), torch.from_numpy(y).split(ROWS)

    def run() -> None:
        for rows, wanted in zip(inputs, classes, strict=True):
            optimizer.zero_grad()
            loss(model(rows), wanted).backward()
            optimizer.step()

    return run


def data_parallel(steps: int, repetitions: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, own = data(steps * size, None), data(steps, rank)
    with unidist.DataParallel().scope():
        ours = compiled(keras_model())
    inside = compiled(InsideDDP(keras_model()))
    hand = torch.nn.parallel.DistributedDataParallel(torch_model())
    candidates = {
        "unidist, fit": fitting(ours, *whole, ROWS * size),
        "the Keras model in DDP, fit": fitting(inside, *own, ROWS),
        "PyTorch by hand with DDP": by_hand(hand, *own),
    }
    times = seconds(candidates, repetitions)
    if rank == 0:
        names = list(candidates)
        bounds = {(names[0], names[1]): 1.0, (names[0], names[2]): 1.15}
        report(f"Data parallel, {size} ranks, {ROWS} rows each", times, steps, bounds)


def tensor_parallel(steps: int, repetitions: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    rows = data(steps, None)
    mesh = unidist.Mesh({"model": size})
    rules = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
    with unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules)).scope():
        ours = compiled(keras_model())
    native = dist.device_mesh.init_device_mesh("cpu", (size,))
    hand = parallelize_module(torch_model(), native, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    candidates = {
        "unidist, fit": fitting(ours, *rows, ROWS),
        "PyTorch by hand with DTensor": by_hand(hand, *rows),
    }
    times = seconds(candidates, repetitions)
    if dist.get_rank() == 0:
        names = list(candidates)
        report(f"Tensor parallel over {size}, {ROWS} rows", times, steps, {(names[0], names[1]): 1.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of one turn")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data_parallel(options.steps, options.repetitions)
    tensor_parallel(options.steps, options.repetitions)


if __name__ == "__main__":
    main()
