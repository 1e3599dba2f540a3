"""What the processes of test_held.py run: what a rank keeps of a model, and what a step makes beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal
from unittest import mock

import keras
import numpy as np
import torch

import unidist
from tests.gpu.device import ON_GPU
from tests.gpu.results import Held
from unidist.keras.records import model_record
from unidist.keras.torch.params import flat_buffer, host_memory, param_groups
from unidist.keras.torch.step import reducer

# Kernels alone, which two ranks cut evenly: no padding.
DEPTH, WIDTH, ROWS = (24, 2048, 8) if ON_GPU else (24, 256, 8)
KERNEL = 4 * WIDTH * WIDTH
# Two kernels fill a bucket, and one a unit: on a GPU as it is, on a CPU made so.
_SIZES = (
    (reducer, "FIRST_BUCKET_BYTES"),
    (reducer, "BUCKET_BYTES"),
    (param_groups, "UNIT_BYTES"),
    (param_groups, "KEPT_UNIT_BYTES"),
)


def held(zero: int, offload: Literal["none", "states"] = "none") -> Held:
    """After three steps of Adam under a stage of ZeRO."""
    with ExitStack() as stack:
        for module, name in () if ON_GPU else _SIZES:
            stack.enter_context(mock.patch.object(module, name, (2 if module is reducer else 1) * KERNEL))
        # On a GPU nothing is too large to be copied into a buffer.
        stack.enter_context(mock.patch.object(flat_buffer, "LOOSE_BYTES", DEPTH * KERNEL + 1))
        stack.enter_context(mock.patch.object(host_memory, "TURN_BYTES", KERNEL))
        return _held(zero, offload)


def _held(zero: int, offload: Literal["none", "states"]) -> Held:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    gc.collect()
    before = _allocated()
    with unidist.DataParallel(zero=zero, offload=offload).scope():
        stack = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(DEPTH)]
        model = keras.Sequential([keras.Input((WIDTH,)), *stack])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
    x = np.ones((ROWS, WIDTH), "float32")
    for _ in range(3):
        model.train_on_batch(x, x)
    traffic, rank = model_record.of(model).engine.traffic, unidist.process_index()
    traffic.settle()
    storages = [v._storage for v in model.trainable_variables]
    slots = [v._storage for v in model.optimizer.variables if len(v.shape)]
    buckets, fetched = traffic.reducer(rank).buckets, traffic._fetchers[rank].units
    return Held(
        model=DEPTH * KERNEL,
        weights=_bytes(p for s in storages for p in (s.shards[rank], s.leaves[rank], s.states[rank])),
        slots=_bytes(s.shards[rank] for s in slots if not isinstance(s, host_memory.HostStorage)),
        on_host=_bytes(s.shards[rank] for s in slots if isinstance(s, host_memory.HostStorage)),
        pinned=all(s.shards[rank].is_pinned() for s in slots) if ON_GPU else False,
        gradients=_bytes(
            p.grad for s in storages for p in (s.shards[rank], s.leaves[rank], s.states[rank]) if p.grad is not None
        ),
        allocated=_allocated() - before,
        made=_made(lambda: model.train_on_batch(x, x)),
        units=max((unit.nbytes for unit in fetched), default=0),
        buckets=max(bucket.nbytes for bucket in buckets),
        bucket_count=len(buckets),
        layer=KERNEL,
        activations=DEPTH * 4 * WIDTH * ROWS // unidist.process_count(),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind them, each piece counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors) if s.nbytes()}.values())


def _allocated() -> int:
    return int(torch.cuda.memory_allocated()) if ON_GPU else 0


def _made(call: Callable[[], Any]) -> int:
    """Bytes of the GPU's memory that are made inside, at most at one time."""
    if not ON_GPU:
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = _allocated()
    call()
    return int(torch.cuda.max_memory_allocated()) - before
