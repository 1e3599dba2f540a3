"""The perceptron that programs by hand and Keras train alike, and the step of each: after `unidist.use`."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import torch
from paired import Step
from torch import nn

WIDTH, CLASSES = 1024, 10


def keras_model(hidden: int = 2) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((784,)),
            *(keras.layers.Dense(WIDTH, activation="relu", name=name) for name in "abc"[:hidden]),
            keras.layers.Dense(CLASSES, name="logits"),
        ]
    )


def torch_model(hidden: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise([784, *[WIDTH] * hidden]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    return (
        torch.tensor(rng.normal(size=(rows, 784)).astype("float32")),
        torch.tensor(rng.integers(0, CLASSES, size=(rows,))),
    )


def fits_step(model: keras.Model, x: Any, y: Any) -> Step:
    """The step that fit runs on a compiled model: forward, loss, backward, reduction, optimizer, metrics."""
    from unidist.keras.records import model_record

    model.train_on_batch(x, y)
    engine, function = model_record.of(model).engine, model.train_function
    engine._ready, engine.logs_are_read = True, False  # as in fit(verbose=0)
    return lambda: function([(x, y)])


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> Step:
    loss_of = nn.CrossEntropyLoss()

    def step() -> object:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step
