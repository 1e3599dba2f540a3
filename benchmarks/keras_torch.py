"""Keras on torch, two gloo processes with one thread each: unidist against what one would write by hand.

    unidist run -n 2 benchmarks/keras_torch.py [--rounds 15] [--steps 10] [--compiled]

All programs run in one process group, in turns, on an MLP 784-1024-1024-10 with 256 rows a rank and SGD with momentum.
Prints medians of paired ratios; absolute times depend on the machine.

    data parallel   fit's own step under DataParallel
                    / torch DDP around the same Keras model, with Keras's loss and optimizer
                    / PyTorch by hand: nn.Module, DDP, torch.optim
    tensor parallel fit's own step under ModelParallel, a column and a row layer
                    / PyTorch by hand: parallelize_module, DTensor, torch.optim

--compiled: of those by hand and of ours, the models are programs of torch.compile (jit_compile=True in ours).
"""

from __future__ import annotations

import argparse
from typing import Any

import unidist

unidist.use("torch")

import keras  # noqa: E402
import torch  # noqa: E402
from mlp import batch, crossentropy, fits_step, keras_model, step_by_hand, torch_model  # noqa: E402
from paired import Step, report, seconds  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

ROWS = 256


def ours(strategy: unidist.ModelParallel | unidist.DataParallel, rows: int, compiled: bool = False) -> Step:
    with strategy.scope():
        model = keras_model()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=crossentropy(), jit_compile=compiled)
    return fits_step(model, *batch(rows))


def keras_under_ddp() -> Step:
    model = keras_model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, loss_of = keras.optimizers.SGD(0.01, momentum=0.9), crossentropy()
    x, y = batch(ROWS)
    variables = model.trainable_variables
    optimizer.build(variables)

    def step() -> object:
        y_pred = wrapped(x)
        model.zero_grad()
        loss = loss_of(y, y_pred)
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        return loss

    return step


def by_hand(model: nn.Module, foreach: bool = True, compiled: bool = False) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=foreach)
    called: Any = torch.compile(model) if compiled else model
    return step_by_hand(called, optimizer, *batch(ROWS))


def torch_under_ddp(compiled: bool = False) -> Step:
    return by_hand(DistributedDataParallel(torch_model(), gradient_as_bucket_view=True), compiled=compiled)


def torch_tensor_parallel(compiled: bool = False) -> Step:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(torch_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # Fused updates refuse a model where some parameters are DTensors and some are not.
    return by_hand(model, foreach=False, compiled=compiled)


def tensor_parallel(compiled: bool = False) -> Step:
    mesh = unidist.Mesh({"model": 2})
    rules = {".*a/kernel": (None, "model"), ".*a/bias": ("model",), ".*b/kernel": ("model", None)}
    return ours(unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules)), ROWS, compiled)


Group = tuple[str, dict[str, Step], dict[str, float]]


def as_they_are() -> list[Group]:
    data_parallel = ours(unidist.DataParallel(), ROWS * unidist.process_count())
    return [
        (
            "data parallel",
            {"unidist": data_parallel, "DDP around Keras": keras_under_ddp(), "DDP by hand": torch_under_ddp()},
            {"DDP around Keras": 1.00, "DDP by hand": 1.15},
        ),
        (
            "tensor parallel",
            {"unidist": tensor_parallel(), "parallelize_module by hand": torch_tensor_parallel()},
            {"parallelize_module by hand": 1.00},
        ),
    ]


def as_programs() -> list[Group]:
    data_parallel = ours(unidist.DataParallel(), ROWS * unidist.process_count(), compiled=True)
    return [
        (
            "data parallel, both compiled",
            {"unidist": data_parallel, "DDP by hand": torch_under_ddp(compiled=True)},
            {"DDP by hand": 1.15},
        ),
        (
            "tensor parallel, both compiled",
            {
                "unidist": tensor_parallel(compiled=True),
                "parallelize_module by hand": torch_tensor_parallel(compiled=True),
            },
            {"parallelize_module by hand": 1.00},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for title, candidates, aims in as_programs() if arguments.compiled else as_they_are():
        times = seconds(candidates, arguments.rounds, steps=arguments.steps, meet=unidist.barrier)
        if unidist.process_index() == 0:
            report(title, times, arguments.steps, {("unidist", name): aim for name, aim in aims.items()})


if __name__ == "__main__":
    main()
