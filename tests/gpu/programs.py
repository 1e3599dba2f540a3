"""What the processes of the GPU tests run. None of it has ever run on a GPU; on CPUs it has.

DEVICE is "cuda", or what TESTS_GPU_DEVICE says: on "cpu" all but the device is tried, and collectives still go the way
of CUDA tensors, over the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import unidist
from tests.parity.train import Spec
from tests.torch import test_conformance
from tests.torch.accelerators import nowhere_near
from unidist.algebra import Mesh
from unidist.backends.protocol import ALL_DTYPES, Array
from unidist.testing.laws import World

DEVICE = os.environ.get("TESTS_GPU_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"


def start(joins: bool) -> None:
    """Makes the process ready: with unidist, or with Keras alone, as a user has it without."""
    # Numbers are compared with one device's: no shortcuts that lose digits.
    torch.backends.cudnn.allow_tf32 = False
    if joins:
        unidist.use("torch")
        if not ON_GPU:
            nowhere_near()
    import keras

    keras.utils.disable_interactive_logging()


# conformance ----------------------------------------------------------------------------------------------------------


def world() -> World:
    """The laws' world, of tensors on the device."""
    if not ON_GPU:
        nowhere_near()
    made = test_conformance.world(layout_pairs=20)

    def array(value: Array, dtype: str) -> torch.Tensor:
        found: torch.Tensor = made.array(value, dtype)
        return found.to(DEVICE)

    return replace(made, array=array, numpy=lambda x: made.numpy(x.cpu()))


# placement ------------------------------------------------------------------------------------------------------------


def places() -> dict[str, str]:
    """Where a model's variables, its optimizer's, its metrics', its random states' and its predictions are."""
    import keras

    from unidist.keras.compat import get_device

    with unidist.DataParallel(zero=1).scope():
        dropout = keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), dropout, keras.layers.Dense(2)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((8, 6), "float32")
    model.fit(x, x[:, :2], batch_size=4, verbose=0)
    kinds = {
        "weights": model.trainable_variables,
        "slots": model.optimizer.variables,
        "metrics": model.metrics_variables,
        "seeds": [dropout.seed_generator.state],
    }
    found = {name: "/".join(sorted({_place(v) for v in variables})) for name, variables in kinds.items()}
    return {**found, "keras": str(get_device()), "called": str(model(x).device)}


def _place(variable: Any) -> str:
    return "/".join(sorted({str(shard.device) for shard in variable._storage.shards.values()}))


def batches() -> set[str]:
    """Where the batches are that a step is given, and whether their copies were waited for."""
    import keras

    from unidist.keras.torch import devices

    seen: set[str] = set()
    sent = devices.sent

    def noting(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        found = sent(x, device)
        seen.add(found.device.type)
        return found

    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    with mock.patch.object(devices, "sent", noting):
        model.fit(np.ones((8, 6), "float32"), np.ones((8, 2), "float32"), batch_size=4, verbose=0)
    return seen


# training -------------------------------------------------------------------------------------------------------------


def train_in_parts(spec: Spec | None) -> list[float]:
    """The losses of a training under sequence parallelism; None: on one device."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    scope: Any = contextlib.nullcontext()
    if spec is not None:
        scope = unidist.ModelParallel(unidist.Mesh(dict(spec.axes)), sequence_parallel=True).scope()
    with scope:
        tokens = keras.Input((8,), dtype="int32")
        x = keras.layers.Embedding(11, 16, name="embed")(tokens)
        for k in range(2):
            attended = keras.layers.MultiHeadAttention(2, 8, name=f"attention_{k}")(x, x)
            x = keras.layers.LayerNormalization(name=f"norm_{k}")(x + attended)
            wide = keras.layers.Dense(32, "gelu", name=f"up_{k}")(x)
            x = keras.layers.LayerNormalization(name=f"last_{k}")(x + keras.layers.Dense(16, name=f"down_{k}")(wide))
        model = keras.Model(tokens, keras.layers.Dense(3, name="head")(x))
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 11, (12, 8)), draw.normal(size=(12, 8, 3)).astype("float32")
    found: list[float] = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return found


# NCCL alone -----------------------------------------------------------------------------------------------------------


def call_nccl() -> list[str]:
    """Each primitive on each dtype in a group of one rank, which NCCL runs as any other: what did not come back."""
    from unidist.backends.torch.buffers import BufferedCollectives
    from unidist.backends.torch.primitives import Eager

    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", init_method=_address(), rank=0, world_size=1)
    adapter: Any = unidist.use("torch", devices=["gpu:0" if ON_GPU else "cpu:0"])
    transport = adapter.comm.transport(Mesh({"x": 1}).group("x", 0))
    ways = BufferedCollectives(Eager())
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: ways.all_reduce(x, transport, "sum"),
        "max": lambda x: ways.all_reduce(x, transport, "max"),
        "all_gather": lambda x: ways.all_gather(x, transport, 0, [4]),
        "reduce_scatter": lambda x: ways.reduce_scatter(x, transport, 0, [4], "sum"),
        "all_to_all": lambda x: ways.all_to_all(x, transport, 0, [4], 1, [3]),
        "broadcast": lambda x: ways.broadcast(x, transport, 0),
    }
    wrong = []
    for dtype in sorted(ALL_DTYPES):
        x = (torch.arange(12).view(4, 3) % 2).to(getattr(torch, dtype)).to(DEVICE)
        for name, call in calls.items():
            found = call(x)
            if found.dtype != x.dtype or found.device != x.device or not torch.equal(found.cpu(), x.cpu()):
                wrong.append(f"{name} of {dtype}")
    adapter.comm.barrier(transport_group := Mesh({"x": 1}).group("x", 0))
    assert transport_group.size == 1
    unidist.shutdown()
    dist.destroy_process_group()
    return wrong


def join_a_group_of_nccl_alone() -> tuple[str, float]:
    """(what carries tensors, a sum of CPU tensors) where the program has made a group for CUDA tensors, bound to its
    device."""
    device = torch.device("cuda", 0)
    options: Any = {"device_id": device} if ON_GPU else {}
    kinds = "nccl" if ON_GPU else "cuda:gloo"
    dist.init_process_group(kinds, init_method=_address(), rank=0, world_size=1, **options)
    adapter: Any = unidist.use("torch", devices=["gpu:0" if ON_GPU else "cpu:0"])
    transport = adapter.comm.transport(Mesh({"x": 1}).group("x", 0))
    x = torch.ones(3)
    transport.pg.allreduce([x]).wait()
    unidist.shutdown()
    told = dist.get_backend_config(transport.pg)
    dist.destroy_process_group()
    return told, float(x.sum())


def _address() -> str:
    from unidist.testing.processes import free_port

    return f"tcp://127.0.0.1:{free_port()}"


# what a step costs ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Inside, what waits for the GPU raises."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _stepping(zero: int, width: int = 64, *, norm: bool = True) -> tuple[Callable[[], Any], Any]:
    """(one step of Keras's trainer on data that is there, the model)."""
    import keras

    from unidist.keras.compat import get_device
    from unidist.keras.torch import data, engine
    from unidist.keras.torch.context import Rows

    unidist.use("torch")
    keras.utils.set_random_seed(3)
    with unidist.DataParallel(zero=zero).scope():
        layers = [
            keras.layers.Dense(width, "relu"),
            *([keras.layers.BatchNormalization()] if norm else []),
            keras.layers.Dropout(0.5, seed=2),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    found = engine.engine_of(model)
    assert found is not None
    draw = np.random.default_rng(0)
    given = tuple(torch.tensor(draw.normal(size=(8, n)).astype("float32")).to(get_device()) for n in (8, 2))
    batch = data.LocalBatches([given], Rows(8, 8, True, 8))

    def step() -> Any:
        with found.session(logs_are_read=False):
            found.prepare()
            return found.step(lambda batches: model.train_step(batches[0]), batch, kind="train")

    return step, model


def step_without_waits(zero: int) -> None:
    """Raises where a warm step waits for the GPU."""
    step, _ = _stepping(zero)
    for _ in range(3):
        step()
    with no_waits():
        step()
    unidist.shutdown()


def memory(zero: int, steps: int = 50) -> list[int]:
    """Bytes in use after ten steps and after more."""
    step, _ = _stepping(zero, width=1024 if ON_GPU else 16)
    found = []
    for count in (10, steps - 10):
        for _ in range(count):
            step()
        found.append(int(torch.cuda.memory_allocated()) if ON_GPU else 0)
    unidist.shutdown()
    return found


def adam(fuses: bool) -> tuple[dict[str, Any], int]:
    """Weights after five steps, and how many tensors the fused kernel has updated."""
    from unidist.keras.torch.steps import fused

    taken = 0
    fits = fused._fits

    def counting(tensors: list[torch.Tensor]) -> bool:
        nonlocal taken
        found = fuses and fits(tensors)
        taken += found
        return found

    with mock.patch.object(fused, "_fits", counting):
        # A bias before a norm has no gradient but rounding, and Adam makes whole steps of it.
        step, model = _stepping(0, norm=False)
        for _ in range(5):
            step()
    weights = {v.path: np.asarray(v) for v in model.trainable_variables}
    unidist.shutdown()
    return dict(zip(map(str, range(len(weights))), weights.values(), strict=True)), taken
