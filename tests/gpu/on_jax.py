"""What the processes of test_jax.py run: JAX on one device."""

from __future__ import annotations

import jax
import keras
import numpy as np

import unidist
from tests.gpu.device import NAME, ON_GPU
from tests.jax import test_conformance
from unidist.testing.laws import World


def start(joins: bool) -> None:
    """Makes the process ready: with unidist, or with Keras alone."""
    if joins:
        unidist.use("jax", devices=[NAME])
    keras.utils.disable_interactive_logging()


def lacks_a_gpu() -> bool:
    """Whether JAX finds none here, as where it was installed for CPUs."""
    try:
        return ON_GPU and not jax.devices("gpu")
    except RuntimeError:
        return True


def world() -> World:
    """The laws' world, of one device."""
    return test_conformance._world(unidist.use("jax", devices=[NAME]), layout_pairs=4)


def places() -> set[str]:
    """Where the variables of a trained model are, and what it predicts."""
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    x = np.ones((8, 6), "float32")
    model.fit(x, x[:, :2], batch_size=4, verbose=0)
    values = [v.value for v in [*model.variables, *model.optimizer.variables]] + [model(x)]
    return {f"{device.platform}:{device.id}" for value in values for device in value.devices()}
