"""What the processes of test_streams.py run: trainings in which the streams of ranks are held up in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch

import unidist
from tests.gpu.device import DEVICE, ON_GPU, pause
from tests.gpu.results import STEPS, Trained
from unidist.algebra import Mesh
from unidist.backends import registry
from unidist.keras.records import model_record
from unidist.keras.torch.params import param_group, param_groups
from unidist.keras.torch.params.buckets import CutBucket, Watched, WholeBucket
from unidist.keras.torch.params.flat_buffer import Cut
from unidist.keras.torch.step import reducer
from unidist.keras.torch.world import RankWorld

WIDTH = 512 if ON_GPU else 64
# A layer fills one.
_SMALL = WIDTH * WIDTH


def train(zero: int | None, holds_up: bool = False) -> Trained:
    """Some steps of fit; None: by Keras alone, on one device.

    holds_up: on each rank the stream is held up ahead of every second launch of a bucket of gradients or of a unit of
    weights, and ahead of every second use of one. The ranks take turns: what is used without a wait for the other rank
    was not summed.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(9)
    stack = [keras.layers.Dense(WIDTH, "tanh") for _ in range(5)]
    with ExitStack() as around:
        for module, name in ((reducer, "FIRST_BUCKET_BYTES"), (reducer, "BUCKET_BYTES"), (param_groups, "UNIT_BYTES")):
            around.enter_context(mock.patch.object(module, name, _SMALL))
        around.enter_context(mock.patch.object(param_groups, "KEPT_UNIT_BYTES", _SMALL))
        found = Trained({}, blocking=os.environ.get("CUDA_LAUNCH_BLOCKING"))
        if holds_up:
            around.enter_context(_held_up(found))
        if zero is not None:
            around.enter_context(unidist.DataParallel(zero=zero).scope())
        model = keras.Sequential([keras.Input((WIDTH,)), *stack, keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        draw = np.random.default_rng(2)
        x, y = (draw.normal(size=(16 * STEPS, n)).astype("float32") for n in (WIDTH, 4))
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        if zero is not None:
            found.buckets = len(model_record.of(model).engine.traffic.reducer(unidist.process_index()).buckets)
            found.weights = unidist.gather_weights(model)
        else:
            found.weights = {v.path: np.array(v) for v in model.weights}
    return found


@contextmanager
def _held_up(found: Trained) -> Iterator[None]:
    """Notes in `found` what was launched."""
    rank = unidist.process_index()

    def counted(kind: str, original: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            number = found.launched[kind] = found.launched.get(kind, 0) + 1
            waits = number % 2 == rank % 2
            found.held_up[kind] = found.held_up.get(kind, 0) + waits
            if waits and not after:
                pause()
            result = original(*args)
            if waits and after:
                pause()
            return result

        return call

    with ExitStack() as stack:
        for kind in (WholeBucket, CutBucket):
            for name, after in (("launch", False), ("finish", True)):
                patched = counted(name, getattr(kind, name), after)
                stack.enter_context(mock.patch.object(kind, name, patched))
        for name, after in (("start", False), ("finish", True)):
            patched = counted(f"unit's {name}", getattr(param_group.Unit, name), after)
            stack.enter_context(mock.patch.object(param_group.Unit, name, patched))
        yield


# buckets by themselves ------------------------------------------------------------------------------------------------


def reuse(cut: bool, steps: int = 20) -> tuple[list[float], list[float]]:
    """(sums of a bucket's gradients in each step, those that are wanted): gradients are made behind a stream that is
    held up, and each step's sums are read behind one. Nothing waits for the GPU before the end."""
    rank, count = unidist.process_index(), unidist.process_count()
    mesh = Mesh({"data": count})
    adapter: Any = registry.current()
    world = RankWorld(mesh, adapter, ("data",))
    shape = (256, 128)
    leaves = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for _ in range(3)]
    kind = CutBucket if cut else WholeBucket
    half = Cut(shape, 0, (shape[0] // count,) * count)
    axes = ("data",) if cut else ()
    members = [Watched(p, p, ("data",), axes, half if cut else None) for p in leaves]
    bucket = kind(world, rank, members)
    sums = []
    for step in range(steps):
        if step % 2 == rank % 2:
            pause()
        for number, leaf in enumerate(leaves):
            leaf.grad = torch.full(shape, float((rank + 1) * (step + 1) + number), device=DEVICE)
        with torch.no_grad():
            bucket.launch()
            made = torch.full(shape, -1.0, device=DEVICE)  # where an early release would leave room
            views = bucket.finish()
            if step % 3 == rank % 3:
                pause()
            sums.append(torch.stack([view.mean() for view in views]).mean())
        del made
    wanted = [sum((r + 1) * (step + 1) + 1 for r in range(count)) for step in range(steps)]
    return [float(one) for one in sums], [float(one) for one in wanted]
