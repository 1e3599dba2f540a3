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
import torch  # noqa: E402
from mlp import batch, crossentropy, fits_step, keras_model, step_by_hand, torch_model  # noqa: E402
from paired import Step, report, seconds  # noqa: E402

ROWS = 256
AIM = 1.15


def ours(rows: int) -> Step:
    with unidist.DataParallel().scope():
        model = keras_model()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=crossentropy())
    return fits_step(model, *batch(rows))


def horovods_own() -> Step:
    model = torch_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return step_by_hand(model, optimizer, *batch(ROWS))


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
