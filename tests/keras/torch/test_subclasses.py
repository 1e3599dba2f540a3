"""Layers that inherit from those of Keras: planning and training read them alike."""

from __future__ import annotations

import keras
import pytest
from keras import layers, ops

import unidist
from tests.keras.torch.models import assert_equal, features, train
from unidist.keras.layers import computes_as
from unidist.keras.records import model_record


class Named(layers.Dense):
    def get_config(self):
        return {**super().get_config(), "note": ""}


class Masking(layers.Dense):
    """Keras asks for a mask of what the layer takes, which is whole."""

    def compute_mask(self, inputs, previous_mask=None):
        return previous_mask


class Doubled(layers.Dense):
    def call(self, x):
        return 2.0 * super().call(x)


class Called(layers.Dense):
    def __call__(self, x, *args, **kwargs):
        return super().__call__(ops.flip(x, axis=-1), *args, **kwargs)


class Weighted(layers.Dense):
    @property
    def kernel(self):
        return super().kernel * ops.cast(ops.arange(self.units), "float32")


class Masked(layers.Embedding):
    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 1)


KINDS = {Named: layers.Dense, Masking: layers.Dense, Doubled: None, Called: None, Weighted: None}


@pytest.mark.parametrize(("kind", "base"), [*KINDS.items(), (Masked, None), (layers.Conv2D, layers.Conv2D.__mro__[1])])
def test_the_class_that_a_layer_computes_as(kind, base):
    arguments = {Masked: (4, 2), layers.Conv2D: (2, 3)}.get(kind, (2,))
    assert computes_as(kind(*arguments)) is base


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_trains(kind):
    """A pair where the plan says so, and none where it does not."""
    x, y = features()
    mesh = unidist.Mesh({"model": 4})

    def build():
        given = keras.Input(x.shape[1:])
        hidden = kind(16, "gelu", name="up")(given)
        return keras.Model(given, layers.Dense(3, name="down")(hidden))

    column = unidist.Layout(None, "model")
    planned = {path for path, layout in unidist.plan(build(), mesh).layout_map.items() if layout == column}
    assert planned == ({"up/kernel"} if KINDS[kind] is not None else set())
    found = train(build, x, y, unidist.ModelParallel(mesh))
    assert_equal(found, train(build, x, y))
    columns = {
        f"{rule.layer.name}/kernel" for rule in model_record.of(found.model).engine.rules if rule.kind == "column"
    }
    assert columns == planned
