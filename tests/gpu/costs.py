"""What the processes of test_costs.py run: steps of Keras's trainer on data that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

import unidist
from tests.gpu.device import ON_GPU, no_waits


def stepping(zero: int, width: int = 64, *, norm: bool = True) -> tuple[Callable[[], Any], Any]:
    """(one step of Keras's trainer on data that is there, the model)."""
    import keras

    from unidist.keras.patching.compat import get_device
    from unidist.keras.torch import cutting, engine
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
    batch = cutting.LocalBatches([given], [Rows(8, (8,))])

    def step() -> Any:
        with found.session(logs_are_read=False):
            found.prepare()
            return found.step(lambda batches: model.train_step(batches[0]), batch, kind="train")

    return step, model


def step_without_waits(zero: int) -> None:
    """Raises where a warm step waits for the GPU."""
    step, _ = stepping(zero)
    for _ in range(3):
        step()
    with no_waits():
        step()
    unidist.shutdown()


def memory(zero: int, steps: int = 50) -> list[int]:
    """Bytes in use after ten steps and after more."""
    step, _ = stepping(zero, width=1024 if ON_GPU else 16)
    found = []
    for count in (10, steps - 10):
        for _ in range(count):
            step()
        found.append(int(torch.cuda.memory_allocated()) if ON_GPU else 0)
    unidist.shutdown()
    return found


def adam(fuses: bool) -> tuple[dict[str, Any], int]:
    """Weights after five steps, and how many tensors the fused kernel has updated."""
    from unidist.keras.torch.step import fused

    taken = 0
    fits = fused._fits

    def counting(tensors: list[torch.Tensor]) -> bool:
        nonlocal taken
        found = fuses and fits(tensors)
        taken += found
        return found

    with mock.patch.object(fused, "_fits", counting):
        # A bias before a norm has no gradient but rounding, and Adam makes whole steps of it.
        step, model = stepping(0, norm=False)
        for _ in range(5):
            step()
    weights = {v.path: np.asarray(v) for v in model.trainable_variables}
    unidist.shutdown()
    return dict(zip(map(str, range(len(weights))), weights.values(), strict=True)), taken
