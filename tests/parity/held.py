"""What a training step holds at most, on torch in several processes."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import torch
from torch.profiler import ProfilerActivity

import unidist
from unidist.keras.records import model_record
from unidist.keras.torch.step import optimizers

DEPTH, WIDTH = 24, 256


def peak_of(call: Callable[[], object]) -> int:
    """Bytes of CPU tensors that are made inside, at most at one time."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def of_gradients(rows: int) -> tuple[int, int]:
    """Bytes of a model's gradients, and what a step of data parallelism holds of them at most: its buckets, and all
    that it makes."""
    keras.utils.set_random_seed(0)
    with unidist.DataParallel().scope():
        stack = [keras.layers.Dense(WIDTH) for _ in range(DEPTH)]
        model = keras.Sequential([keras.layers.Input((WIDTH,)), *stack])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.ones((rows, WIDTH), "float32")
    for _ in range(2):
        model.train_on_batch(x, x)
    # An update makes copies of some tensors at once, from Keras 3.16 on SGD's too: of few, as in large models.
    with mock.patch.object(optimizers, "UPDATE_BYTES", 4 * WIDTH * WIDTH):
        peak = peak_of(lambda: model.train_on_batch(x, x))
    reducer = model_record.of(model).engine.traffic.reducer(unidist.process_index())
    held = sum(bucket.nbytes for bucket in reducer.buckets)
    return sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables), held + peak
