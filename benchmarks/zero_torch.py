"""Sharded states and values on torch, two gloo processes with one thread each, against what one would write by hand.

    unidist run -n 2 benchmarks/zero_torch.py [--rounds 15] [--steps 10] [--compiled | --mixed]

An MLP 784-1024-1024-1024-10, 256 rows a rank, Adam; all programs run in one process group, in turns. Prints medians of
paired ratios (absolute times depend on the machine), and of each of ours what it moves and how much of it is on its way
before backward ends.

    stage 1   / PyTorch by hand: DDP and ZeroRedundancyOptimizer
    stage 3   / PyTorch by hand: FSDP2's fully_shard on every layer

--compiled: of those by hand and of ours, the models are programs of torch.compile (jit_compile=True in ours).
--mixed: stage 3 alone, computed in bfloat16: the policy mixed_bfloat16, and FSDP2's param_dtype. Both gather 16 bits
and sum gradients in 32.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import unidist
from unidist.keras.records import model_record

unidist.use("torch")

import keras  # noqa: E402
import torch  # noqa: E402
from mlp import batch, crossentropy, fits_step, keras_model, step_by_hand, torch_model  # noqa: E402
from paired import Step, report, seconds  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

ROWS, HIDDEN, RATE = 256, 3, 1e-3


def ours(zero: int, compiled: bool, mixed: bool = False) -> tuple[Step, keras.Model]:
    """fit's own step under DataParallel(zero=...)."""
    keras.config.set_dtype_policy("mixed_bfloat16" if mixed else "float32")
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


def fully_sharded(compiled: bool, mixed: bool = False) -> Step:
    model = torch_model(HIDDEN)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (unidist.process_count(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return stepping(model, torch.optim.Adam(model.parameters(), lr=RATE), compiled)


def tell(zero: int, step: Step, model: keras.Model) -> None:
    with unidist.ledger() as traffic:
        step()
    reducer = model_record.of(model).engine.traffic.reducer(unidist.process_index())
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
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--compiled", action="store_true")
    kinds.add_argument("--mixed", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compiled, mixed = arguments.compiled, arguments.mixed
    programs: dict[int, tuple[str, Callable[[], Step], float]] = {
        1: ("DDP, ZeroRedundancyOptimizer", lambda: redundancy_optimizer(compiled), 0.90),
        3: ("FSDP2 fully_shard", lambda: fully_sharded(compiled, mixed), 0.55),
    }
    for zero in (3,) if mixed else (1, 3):
        name, by_hand, aim = programs[zero]
        step, model = ours(zero, compiled, mixed)
        candidates = {"unidist": step, name: by_hand()}
        times = seconds(candidates, arguments.rounds, steps=arguments.steps, meet=unidist.barrier)
        if unidist.process_index() == 0:
            report(f"stage {zero}", times, arguments.steps, {("unidist", name): aim})
            tell(zero, step, model)
        else:
            step()


if __name__ == "__main__":
    main()
