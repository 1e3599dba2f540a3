"""Models that are not built whole when they are distributed: Keras builds the rest from the first batch, or never."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unidist
from tests.keras.torch.models import features, two_by_two

STRATEGIES = {
    "dp": lambda: unidist.DataParallel(),
    "zero": lambda: unidist.DataParallel(zero=3),
    "2x2": lambda: unidist.ModelParallel(two_by_two()),
}


class Model(keras.Model):
    """`build` makes none of its variables; one of its layers is never called."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(8, "relu", name="first"), layers.Dense(3, name="last")
        self.unused = layers.Dense(8, name="unused")

    def call(self, x):
        return self.last(self.first(x))


def built(**shapes):
    model = Model()
    for name, shape in shapes.items():
        getattr(model, name).build(shape)
    model.build((None, 12))
    assert model.built
    return model


MODELS = {
    "of a class": built,
    "in part": lambda: built(first=(None, 12)),
    "with an unused layer": lambda: built(first=(None, 12), last=(None, 8)),
}


def trained(name, strategy=None):
    keras.utils.set_random_seed(3)
    model = MODELS[name]()
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    if strategy is not None:
        unidist.parallelize(model, strategy)
    x, y = features()
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [history, *model.get_weights()], len(model.optimizer.variables)


@pytest.mark.filterwarnings("ignore:.*was called on layer:UserWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_first_batch_builds_trains_as_on_one_device(name, strategy):
    (found, slots), (alone, wanted) = trained(name, STRATEGIES[strategy]()), trained(name)
    assert slots == wanted
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
