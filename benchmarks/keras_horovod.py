"""Keras on torch over Horovod, two processes with one thread each: unidist against Horovod's own optimizer.

    unidist run --backend horovod -n 2 benchmarks/keras_horovod.py [--rounds 15] [--steps 10]

Both programs run in one world, in turns, on an MLP 784-1024-1024-10 with 256 rows a rank and SGD with momentum: fit's
own step under DataParallel, and PyTorch by hand with hvd.DistributedOptimizer around torch.optim. Prints the median of
the paired ratios; absolute times depend on the machine.
"""

from __future__ import annotations

import argparse

import unidist

unidist.use("horovod")

import horovod.torch as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from paired import Step, report, seconds  # noqa: E402
from torch import nn  # noqa: E402

ROWS, WIDTH, CLASSES = 256, 1024, 10
AIM = 1.15


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    return (
        torch.tensor(rng.normal(size=(rows, 784)).astype("float32")),
        torch.tensor(rng.integers(0, CLASSES, size=(rows,))),
    )


def ours(rows: int) -> Step:
    """The step that fit runs: forward, loss, backward, reduction, optimizer, metrics."""
    keras.utils.set_random_seed(0)
    with unidist.DataParallel().scope():
        model = keras.Sequential(
            [
                keras.layers.Input((784,)),
                keras.layers.Dense(WIDTH, activation="relu"),
                keras.layers.Dense(WIDTH, activation="relu"),
                keras.layers.Dense(CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)
    x, y = batch(rows)
    model.train_on_batch(x, y)
    engine, function = model._unidist_engine, model.train_function
    engine._ready, engine.logs_are_read = True, False  # as in fit(verbose=0)
    return lambda: function([(x, y)])


def horovods_own() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    loss_of = nn.CrossEntropyLoss()
    x, y = batch(ROWS)

    def step() -> object:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    candidates = {"unidist": ours(ROWS * unidist.process_count()), "DistributedOptimizer by hand": horovods_own()}
    times = seconds(candidates, arguments.rounds, steps=arguments.steps, meet=unidist.barrier)
    if unidist.process_index() == 0:
        report("data parallel", times, arguments.steps, {("unidist", "DistributedOptimizer by hand"): AIM})


if __name__ == "__main__":
    main()
