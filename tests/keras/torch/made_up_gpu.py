"""A training step without its backward on tensors that say they are on a GPU: torch's fake ones, which hold nothing.

Torch's own check lets a number on the host into operations of the GPU, and copies wait in silence: both are noted here.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import keras
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unidist
from unidist.backends.torch.backend import TorchBackend
from unidist.keras.patching.compat import torch_core
from unidist.keras.torch import context, cutting, engine
from unidist.keras.torch.context import Rows
from unidist.keras.torch.step import fused, optimizers, statistics, step_comm
from unidist.keras.torch.step.reducer import Reducer

GPU = "cuda:0"


class Waits(TorchDispatchMode):
    """Notes what would wait for the GPU, or mixes devices: copies between devices, and reads of single values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        to = (kwargs or {}).get("device")
        kinds = given | ({torch.device(to).type} if to is not None and given else set())
        if len(kinds) > 1 or "local_scalar" in str(func):
            lines = [f for f in traceback.extract_stack() if "/unidist/keras/" in f.filename]
            where = f"{lines[-1].filename.rsplit('/', 1)[1]}:{lines[-1].name}" if lines else "Keras"
            self.found.append(f"{func} on {sorted(kinds)} in {where}")
        return func(*args, **(kwargs or {}))


def _part(x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index], of slices, None and numbers."""
    dim = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            x = x.unsqueeze(dim)
        elif isinstance(one, slice):
            start, stop, _ = one.indices(x.shape[dim])
            x = x.narrow(dim, start, max(stop - start, 0))
        else:
            x, dim = x.select(dim, one), dim - 1
        dim += 1
    return x


@contextmanager
def gpu() -> Iterator[None]:
    """Inside Keras computes on a GPU that is not there."""
    # There is no guard of CUDA's devices here, which copies, slices and gradients ask for. Values are nobody's concern.
    with ExitStack() as stack:
        for owner, name, value in (
            (TorchBackend, "torch_device", lambda self: GPU),
            (torch.Tensor, "copy_", lambda self, other, non_blocking=False: self),
            (torch.Tensor, "__getitem__", _part),
            (step_comm, "Reducer", lambda world, rank, watched: Reducer(world, rank, [])),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _model() -> Any:
    ones: Any = {"kernel_initializer": "ones"}
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 6, mask_zero=True, embeddings_initializer="ones")(tokens)
    x = keras.layers.Dense(4, "relu", kernel_regularizer="l2", activity_regularizer="l2", **ones)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(2, **ones)(x))


def step(zero: int) -> list[str]:
    """What the losses, metrics and the optimizer of a warm step would wait for."""
    unidist.use("torch")
    with gpu():
        with unidist.DataParallel(zero=zero).scope():
            model = _model()
            optimizer = keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
            metrics = [keras.metrics.MeanAbsoluteError()]
            model.compile(optimizer, "mse", metrics=metrics, weighted_metrics=["mse"])
        on = {v.value.device.type for v in (*model.variables, *optimizer.variables)}
        assert on == {"cuda"}, on
        tokens = torch.ones((8, 5), dtype=torch.int32, device=GPU)
        given = tokens, torch.ones((8, 5, 2), device=GPU), torch.ones((8, 5), device=GPU)
        found = engine.engine_of(model)
        assert found is not None

        def without_backward(batches: Any) -> Any:
            (x, y, weights), frame = batches[0], context.frame()
            assert frame is not None
            with torch.no_grad():
                out = model(x, training=True)
                loss = model._compute_loss(x=x, y=y, y_pred=out, sample_weight=weights, training=True)
                model._loss_tracker.update_state(loss, sample_weight=x.shape[0])
                # The kernel itself is nothing that fake tensors know.
                own = [v._storage.own(frame) for v in model.trainable_variables]
                optimizers.clipped(optimizer, own, model.trainable_variables)
                fused._step_size(optimizer, optimizer.learning_rate, torch.float32)
                return model.compute_metrics(x, y, out, sample_weight=weights)

        with found.session(logs_are_read=False):
            found.prepare()
            for _ in range(2):
                with Waits() as waits:
                    found.step(
                        without_backward,
                        cutting.LocalBatches([given], [Rows(8, (8,))]),
                        kind="train",
                    )
    unidist.shutdown()
    return waits.found


def seeds() -> list[Any]:
    """Of a generator of random numbers whose state is on the host: where the state and the next seed are, and the seeds
    that Keras draws with a GPU and without one."""
    unidist.use("torch")
    with unidist.DataParallel().scope():
        layer = keras.layers.Dropout(0.5, seed=3)
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile("sgd", "mse")
    generator = layer.seed_generator
    statistics.keep_seeds_on_host(model)
    plain = [generator.next().tolist() for _ in range(2)]
    generator.state.assign([3, 0])
    with mock.patch.object(torch_core, "DEFAULT_DEVICE", GPU):
        found = [generator.next() for _ in range(2)]
    unidist.shutdown()
    return [plain, [seed.tolist() for seed in found], {seed.device.type for seed in found}]
