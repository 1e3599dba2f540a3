"""Rematerialization changes memory and nothing else: numbers, statistics and random numbers are those without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import pytest
import torch
from keras import layers, ops
from torch.utils.checkpoint import checkpoint

import unidist
from tests.keras.torch.models import assert_equal, features, model_parallel, train, two_by_two
from unidist.keras.torch.params import param_groups

STRATEGIES = {
    "dp": lambda: unidist.DataParallel(),
    "tp": lambda: model_parallel(),
    "2x2": lambda: model_parallel(mesh=two_by_two()),
    "zero 3": lambda: unidist.DataParallel(zero=3),
    "gathered": lambda: model_parallel({".*a/kernel": (None, "model"), ".*n/gamma": ("model",)}),
}


class Block(layers.Layer):
    """A layer of layers, which know from their caller that this is training, and which adds a loss."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.drop, self.second = layers.Dense(6, "tanh"), layers.Dropout(0.5), layers.Dense(8)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 6))

    def call(self, x):
        x = self.second(self.drop(self.first(x)))
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class Threaded(keras.Model):
    """Its backward runs in a thread of its own, as autograd's does on an accelerator."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        with ThreadPoolExecutor(1) as another:
            another.submit(loss.backward).result()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        return {"loss": loss}


def net(mode, model=keras.Model, layer_names=()):
    def build():
        with keras.RematScope(mode=mode, layer_names=list(layer_names)):
            inputs = layers.Input((12,))
            x = layers.Dense(16, "relu", name="a")(inputs)
            x = layers.Dense(8, name="b")(layers.Dropout(0.5, seed=3)(x))
            x = layers.BatchNormalization(name="n")(x)
            return model(inputs, layers.Dense(3, name="c")(Block(name="block")(x)))

    return build


def trained(strategy, *remat, **options):
    x, y = features(7)
    return train(net(*remat, **options), x, y, strategy, epochs=1)


MODES = {"full": ("full",), "activations": ("activations",), "one layer": ("list_of_layers", keras.Model, ["block"])}


CASES = [*((name, "full") for name in STRATEGIES), ("tp", "activations"), ("zero 3", "one layer")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_training_is_what_it_is_without(name, mode, monkeypatch):
    """The same draws, losses and batch statistics: what is computed again draws and writes nothing."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)  # values of no two layers are fetched together
    assert_equal(trained(STRATEGIES[name](), *MODES[mode]), trained(STRATEGIES[name](), None))


class ByHand(layers.Layer):
    """Calls torch's checkpoint itself, with what it is given and with what it holds."""

    def __init__(self, reentrant, **options):
        super().__init__(**options)
        self.first, self.second, self.reentrant = layers.Dense(6, "tanh"), layers.Dense(8), reentrant

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 6))

    def call(self, x):
        return x + checkpoint(lambda z, by: by * self.second(self.first(z)), x, 0.5, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("name", STRATEGIES)
def test_torchs_checkpoint_in_a_layer(name, monkeypatch):
    """Whatever its name was when it was imported, and in the form that cannot see gradients of weights too."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)

    def build(reentrant):
        inputs = layers.Input((12,))
        x = layers.Dense(8, name="b")(layers.Dense(16, "relu", name="a")(inputs))
        x = layers.BatchNormalization(name="n")(ByHand(reentrant)(x))
        return keras.Model(inputs, layers.Dense(3, name="c")(ByHand(reentrant)(x)))

    x, y = features(7)
    wanted = train(lambda: build(False), x, y, None, epochs=1)
    for reentrant in (False, True):
        assert_equal(train(lambda form=reentrant: build(form), x, y, STRATEGIES[name](), epochs=1), wanted)


def test_an_activation_is_the_users_own_again(monkeypatch):
    """Keras puts another in its place in each call, in which ranks wait for each other's weights."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    model = trained(STRATEGIES["zero 3"](), "activations").model
    assert model.get_layer("a").activation is keras.activations.relu


def test_what_is_linear_in_a_weight_has_its_gradient():
    """<W, dL/dW> = L, whatever a dropout with a seed drops."""
    parts, losses = [], []  # of the ranks: each has its part of the weight

    class Linear(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss.backward()
            kernel = self.trainable_weights[0]
            parts.append(float((kernel.value * kernel.value.grad).detach().sum()))
            losses.append(float(loss.detach()))
            return {"loss": loss}

    x, y = features(4, out=8)
    with unidist.ModelParallel(unidist.Mesh({"model": 4}), {".*k/kernel": ("model", None)}).scope():
        with keras.RematScope(mode="full"):
            inputs = layers.Input((12,))
            hidden = layers.Dropout(0.5, seed=1)(layers.Dense(8, use_bias=False, name="k")(inputs))
            model = Linear(inputs, hidden)
        model.compile("sgd", loss=lambda y_true, y_pred: ops.mean(y_true * y_pred, axis=-1))
        model.fit(x, y, batch_size=4, verbose=0)
    assert parts == pytest.approx(losses, abs=1e-6)
