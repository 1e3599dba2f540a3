"""One operation on a sharded tensor, against plain torch and DTensor, and a small Llama wholly on them.

`python benchmarks/carriers.py`: microseconds of CPU, in one process of one thread: what a layout costs, and no traffic.
Rounds of the ways take turns, so that a busy machine slows all alike; the least of a round counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# keras_hub imports TensorFlow wherever it finds it.
sys.path.insert(0, str(Path(__file__).parents[1] / "ci" / "without_tensorflow"))
os.environ.setdefault("KERAS_BACKEND", "torch")

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import unidist
from unidist.algebra import Mesh
from unidist.backends.torch.sharded import Space, distribute, space
from unidist.propagation.layouts import chunked

ROWS, COLUMNS = 16, 32
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, y, w: x + y,
    "mul": lambda x, y, w: x * y,
    "x * 2.0": lambda x, y, w: x * 2.0,
    "mm": lambda x, y, w: torch.mm(x, w),
    "sum": lambda x, y, w: torch.sum(x, -1),
    "reshape": lambda x, y, w: x.reshape(ROWS, 4, COLUMNS // 4),
    "softmax": lambda x, y, w: torch.softmax(x, -1),
    "layer_norm": lambda x, y, w: F.layer_norm(x, (COLUMNS,), w[0], w[1]),
}
Distribute = Callable[[torch.Tensor], Any]


def ways() -> dict[str, tuple[Distribute, Distribute]]:
    """How rows and weights come, by the way."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    here, mesh = own_space(), init_device_mesh("cpu", (1,))

    def cut(x: torch.Tensor) -> Any:
        return distribute(x, here.spec((chunked(0, x.shape[0], 1),), tuple(x.shape)))

    return {
        "torch": (lambda x: x, lambda x: x),
        "carrier": (cut, lambda x: x),
        "DTensor": (
            lambda x: distribute_tensor(x, mesh, [Shard(0)]),
            lambda x: distribute_tensor(x, mesh, [Replicate()]),
        ),
    }


def own_space() -> Space:
    backend: Any = unidist.backend()
    return space(backend, Mesh({"data": 1}))


def least(run: Callable[[], Any], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - began) / times * 1e6


def operations(rounds: int, times: int) -> None:
    made = ways()
    x, y, w = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS, COLUMNS)
    print(f"{'microseconds':<12}" + "".join(f"{way:>12}" for way in made) + f"{'to torch':>10}{'to DTensor':>12}")
    for backward in (False, True):
        print("forward and backward" if backward else "forward")
        for name, operation in OPERATIONS.items():
            runs = {way: _run(operation, backward, cut(x), cut(y), whole(w)) for way, (cut, whole) in made.items()}
            best = dict.fromkeys(runs, float("inf"))
            for _ in range(rounds):
                for way, run in runs.items():
                    best[way] = min(best[way], least(run, times))
            row = "".join(f"{best[way]:>12.1f}" for way in made)
            print(
                f"  {name:<10}{row}{best['carrier'] / best['torch']:>10.2f}{best['carrier'] / best['DTensor']:>12.2f}"
            )


def _run(operation: Callable[[Any, Any, Any], Any], backward: bool, x: Any, y: Any, w: Any) -> Callable[[], Any]:
    if not backward:
        return torch.no_grad()(lambda: operation(x, y, w))
    x = x.detach().requires_grad_()

    def step() -> None:
        out = operation(x, y, w)
        out.backward(out.detach())

    return step


def llama(hidden: int, rounds: int) -> None:
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    model = keras_hub.models.LlamaBackbone(
        vocabulary_size=97, num_layers=2, hidden_dim=hidden, intermediate_dim=2 * hidden, num_query_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    here = own_space()
    ids, mask = torch.randint(1, 97, (16, 64)), torch.ones(16, 64, dtype=torch.int32)

    def cut(x: torch.Tensor) -> Any:
        return distribute(x, here.spec((chunked(0, x.shape[0], 1),), tuple(x.shape)))

    def step(given: Distribute) -> float:
        for variable in model.trainable_variables:
            variable.value.grad = None
        loss = keras.ops.mean(
            keras.ops.square(model({"token_ids": given(ids), "padding_mask": given(mask)}, training=True))
        )
        loss.backward()
        return float(loss.detach())

    found = {way: step(given) for way, given in (("torch", lambda x: x), ("carrier", cut))}
    best = {"torch": float("inf"), "carrier": float("inf")}
    for _ in range(rounds):
        for way, given in (("torch", lambda x: x), ("carrier", cut)):
            best[way] = min(best[way], least(lambda given=given: step(given), 1) / 1e3)  # type: ignore[misc]
    print(
        f"Llama of {hidden}: {best['torch']:.1f} ms, on carriers {best['carrier']:.1f}: "
        f"{best['carrier'] / best['torch']:.2f}; "
        f"losses {found['torch']:.6f} and {found['carrier']:.6f}; gathered: {dict(here.gathers) or 'nothing'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--llama", action="store_true", help="only the models")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        unidist.use("torch")
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        if not asked.llama:
            operations(asked.rounds, asked.times)
        for hidden in (64, 512):
            llama(hidden, asked.rounds)
        dist.destroy_process_group()
