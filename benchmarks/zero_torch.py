"""Sharded states and values on torch, two gloo processes with one thread each, against what one would write by hand.

    unidist run -n 2 benchmarks/zero_torch.py [--rounds 15] [--steps 10] [--compiled]

An MLP 784-1024-1024-1024-10, 256 rows a rank, Adam; all programs run in one process group, in turns. Prints medians of
paired ratios (absolute times depend on the machine), and of each of ours what it moves and how much of it is on its way
before backward ends.

    stage 1   / PyTorch by hand: DDP and ZeroRedundancyOptimizer
    stage 3   / PyTorch by hand: FSDP2's fully_shard on every layer

--compiled: of those by hand and of ours, the models are programs of torch.compile (jit_compile=True in ours).
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import unidist
from unidist.keras import sessions

unidist.use("torch")

import keras  # noqa: E402
import torch  # noqa: E402
from mlp import batch, crossentropy, fits_step, keras_model, step_by_hand, torch_model  # noqa: E402
from paired import Step, report, seconds  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

ROWS, HIDDEN, RATE = 256, 3, 1e-3


def ours(zero: int, compiled: bool) -> tuple[Step, keras.Model]:
    """fit's own step under DataParallel(zero=...)."""
    with unidist.DataParallel(zero=zero).scope():
        model = keras_model(HIDDEN)
        model.compile(keras.optimizers.Adam(RATE), loss=crossentropy(), jit_compile=compiled)
    return fits_step(model, *batch(ROWS * unidist.process_count())), model


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: bool) -> Step:
    called: Any = torch.compile(model) if compiled else model
    return step_by_hand(called, optimizer, *batch(ROWS))


def redundancy_optimizer(compiled: bool) -> Step:
    model = DistributedDataParallel(torch_model(HIDDEN), gradient_as_bucket_view=True)
    return stepping(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE), compiled)


def fully_sharded(compiled: bool) -> Step:
    model = torch_model(HIDDEN)
    mesh = init_device_mesh("cpu", (unidist.process_count(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepping(model, torch.optim.Adam(model.parameters(), lr=RATE), compiled)


def tell(zero: int, step: Step, model: keras.Model) -> None:
    with unidist.ledger() as traffic:
        step()
    reducer = sessions.of(model).engine.traffic.reducer(unidist.process_index())
    whole = sum(bucket.nbytes for bucket in reducer.buckets)
    print(
        f"stage {zero}: {traffic.bytes():,} bytes a step in {traffic.count()} collectives; "
        f"{reducer.launched_early / whole:.0%} of the gradients' bytes launched before backward ended",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    programs = (
        (1, "DDP, ZeroRedundancyOptimizer", redundancy_optimizer, 1.00),
        (3, "FSDP2 fully_shard", fully_sharded, 1.10),
    )
    for zero, name, by_hand, aim in programs:
        step, model = ours(zero, arguments.compiled)
        times = seconds(
            {"unidist": step, name: by_hand(arguments.compiled)},
            arguments.rounds,
            steps=arguments.steps,
            meet=unidist.barrier,
        )
        if unidist.process_index() == 0:
            report(f"stage {zero}", times, arguments.steps, {("unidist", name): aim})
            tell(zero, step, model)
        else:
            step()


if __name__ == "__main__":
    main()
