"""How gradients get to where they are kept: those that are missing, those of several backward passes, those of a step's
own making, and those over several data axes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.keras.torch.models import assert_equal, features, model_parallel, train, two_by_two
from tests.keras.torch.test_steps import OwnStep
from unidist.backends.torch.sharded import ShardedTensor
from unidist.keras.torch.params import flat_buffer

STRATEGIES = {
    "dp": lambda: unidist.DataParallel(),
    "2x2": lambda: model_parallel({".*a/kernel": (None, "model")}, two_by_two()),
    "zero 1": lambda: unidist.DataParallel(zero=1),
    "zero 3": lambda: unidist.DataParallel(zero=3),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(params=["packed", "loose"])
def poisoned(request, monkeypatch):
    """What nobody has written to is no number; tensors move in a buffer, or each by itself."""
    original = torch.empty

    def empty(*args, **options):
        found = original(*args, **options)
        return found.fill_(float("nan")) if found.is_floating_point() and not found.is_meta else found

    monkeypatch.setattr(flat_buffer.torch, "empty", empty)  # type: ignore[attr-defined]
    if request.param == "loose":
        monkeypatch.setattr(flat_buffer, "LOOSE_BYTES", 1)


# missing --------------------------------------------------------------------------------------------------------------


class Skipping(keras.Model):
    """Uses a layer in some steps."""

    def __init__(self):
        super().__init__()
        self.a, self.between = layers.Dense(16, "tanh", name="a"), layers.Dense(16, "tanh", name="between")
        self.b, self.uses = layers.Dense(3, name="b"), True

    def build(self, shape):
        self.a.build(shape)
        self.between.build((None, 16))
        self.b.build((None, 16))
        self.built = True

    def call(self, x):
        h = self.a(x)
        return self.b(h + self.between(h) if self.uses else h)


def skipping():
    model = Skipping()
    model.build((None, 12))
    return model


class EverySecondStep(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.uses = batch % 2 == 0


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_a_variable_without_a_gradient_in_a_step_stays_as_it_is(strategy, poisoned):
    """With momentum: neither its last gradient nor one of zeros is applied."""
    x, y = features(rows=16)
    found, wanted = (
        train(skipping, x, y, given, shuffle=False, callbacks_too=[EverySecondStep()]) for given in (strategy, None)
    )
    assert_equal(found, wanted)


def has_any(rows):
    """Of this rank's rows: a user's code would ask those of all."""
    return bool((rows.local if isinstance(rows, ShardedTensor) else rows).any())


class SkippingRows(OwnStep):
    """A step that uses a layer for some rows, and not at all where its rank has none of them."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        a, between, b = self.layers
        h, chosen = a(x), x[:, :1] > 0
        if has_any(chosen):
            h = h + chosen * between(h)
        loss = self.compute_loss(y=y, y_pred=b(h))
        loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


def skipping_rows():
    return SkippingRows(
        [
            layers.Input((12,)),
            layers.Dense(16, "tanh", name="a"),
            layers.Dense(16, "tanh", name="between"),
            layers.Dense(3, name="b"),
        ]
    )


class ForSomeRows(layers.Layer):
    """The same in a layer. Keras's own step keeps its buckets from step to step."""

    def __init__(self):
        super().__init__()
        self.between = layers.Dense(12, "tanh")

    def build(self, shape):
        self.between.build(shape)

    def call(self, x):
        chosen = x[:, :1] > 0
        return x + chosen * self.between(x) if has_any(chosen) else x


def skipping_in_a_layer():
    return keras.Sequential([layers.Input((12,)), ForSomeRows(), layers.Dense(3)])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("make", [skipping_rows, skipping_in_a_layer])
def test_a_rank_whose_rows_do_not_use_a_variable_adds_nothing(make, zero, poisoned):
    """In each step another rank has a row of those that use it."""
    x, y = features(rows=16)
    x[:, 0] = np.where(np.arange(16) % 4 == np.arange(16) // 4, 1.0, -1.0)
    found, wanted = (train(make, x, y, given, shuffle=False) for given in (unidist.DataParallel(zero=zero), None))
    assert_equal(found, wanted)


# several backward passes ----------------------------------------------------------------------------------------------


class Passes(OwnStep):
    """Backward several times before the gradients are applied and forgotten, once through a part of the layers; what
    only asks for gradients between accumulates none."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        trainable = list(self.trainable_weights)
        for part in (self.layers, self.layers[:1], self.layers):
            h = x
            for layer in part:
                h = layer(h, training=True)
            loss = self.compute_loss(y=y, y_pred=h[:, : y.shape[1]])
            torch.autograd.grad(loss, [v.value for v in trainable], retain_graph=True, allow_unused=True)
            loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


def passes():
    return Passes([layers.Input((12,)), layers.Dense(16, "tanh", name="a"), layers.Dense(3, name="b")])


def test_backward_passes_of_a_step_add_up(strategy):
    x, y = features()
    assert_equal(train(passes, x, y, strategy), train(passes, x, y))


class Clipping(OwnStep):
    """Clips by torch's own functions, which see what each process holds."""

    limit, order, by = 0.05, 2.0, "variables"

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        trainable = list(self.trainable_weights)
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        given = self.parameters() if self.by == "parameters" else [v.value for v in trainable]
        norm = torch.nn.utils.clip_grad_norm_(given, self.limit, self.order)
        again = torch.nn.utils.get_total_norm([v.value.grad for v in trainable], self.order)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        return {"loss": loss, "norm": norm, "clipped": again}


def clipping(order, by):
    def make():
        model = Clipping([layers.Input((12,)), layers.Dense(16, "tanh", name="a"), layers.Dense(3, name="b")])
        model.order, model.by = order, by
        return model

    return make


@pytest.mark.parametrize("by", ["variables", "parameters"])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_torchs_own_clipping_is_by_norms_of_whole_variables(strategy, order, by):
    x, y = features()
    found, wanted = (train(clipping(order, by), x, y, given) for given in (strategy, None))
    assert_equal(found, wanted)
    assert max(wanted.history["norm"]) > Clipping.limit


# of a step's own making -----------------------------------------------------------------------------------------------


class WholeGradients(OwnStep):
    """Gives gradients of whole variables that it made itself, and that nobody reduced."""

    def train_step(self, data):
        trainable = list(self.trainable_weights)
        made = [ops.reshape(ops.arange(int(np.prod(v.shape)), dtype="float32"), v.shape) / 100 for v in trainable]
        with torch.no_grad():
            self.optimizer.apply(made, trainable)
        return {"loss": ops.sum(made[0])}


def whole_gradients():
    return WholeGradients([layers.Input((12,)), layers.Dense(16, "tanh", name="a"), layers.Dense(3, name="b")])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_whole_gradients_of_a_steps_own_are_cut_to_what_a_rank_updates(zero):
    x, y = features(rows=4)
    mesh = two_by_two()
    strategy = unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {".*a/kernel": ("model", None)}), zero=zero)
    assert_equal(train(whole_gradients, x, y, strategy), train(whole_gradients, x, y))


# over several data axes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rule_of_one_of_two_data_axes(zero):
    """Gradients are cut over it, and what is left is summed over the other."""
    mesh = unidist.Mesh({"replica": 2, "data": 2})
    rules = unidist.LayoutMap(mesh, {".*a/kernel": ("data", None), ".*b/kernel": ("data", None)})
    strategy = unidist.ModelParallel(mesh, rules, data_axis=("replica", "data"), model_axis=(), zero=zero)
    x, y = features()

    def build():
        return keras.Sequential([layers.Input((12,)), layers.Dense(16, "tanh", name="a"), layers.Dense(4, name="b")])

    y = np.concatenate([y, y[:, :1]], axis=1)
    with unidist.ledger() as book:
        found = train(build, x, y, strategy)
    assert_equal(found, train(build, x, y))
    assert book.count("reduce_scatter", purpose="gradient") > 0
    if not zero:
        cut = 4 * (12 * 16 + 16 * 4)
        steps = {e.axes: e.bytes for e in book.events if e.purpose == "gradient"}
        assert steps == {("data",): cut / 2, ("replica",): cut / 2, ("replica", "data"): 2 * 3 / 4 * 4 * (16 + 4)}
