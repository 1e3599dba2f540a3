"""What is logged of a model: once what is laid out how, and what is gathered why."""

from __future__ import annotations

import logging

import keras
from keras import layers, ops

import unidist
from tests.keras.torch.models import features, model_parallel, two_by_two
from tests.keras.torch.test_subclasses import Doubled

RULES = {"net/a/kernel": (None, "model"), "net/b/kernel": ("model", None), "net/(own|c)/kernel": (None, "model")}
MESH = "Mesh({'data': 2, 'model': 2})"
APPLIED = f"model 'net' under ModelParallel on {MESH}: 4 of 8 variables cut, batches over 'data', zero=0"
OWN = "gathered for each call: a Doubled computes otherwise than the Dense that it inherits from"
COLUMN = "column: its outputs stay cut, until an operation needs all of them"
INFO = [APPLIED, f"{OWN}: 'net/own'"]
DEBUG = [
    "'net/a/kernel' of shape (12, 16) rests Layout(None, 'model'), is used Layout(None, 'model', fanout='data'), is "
    "updated Layout(None, 'model'): rule 'net/a/kernel'",
    "'net/b/bias' of shape (8,) rests Layout(), is used Layout(fanout='data'), is updated Layout(): no rule",
    "'net/c/kernel' of shape (8, 4) rests Layout(None, 'model'), is used Layout(None, 'model', fanout='data'), is "
    "updated Layout(None, 'model'): rule 'net/(own|c)/kernel'",
    f"'net/own': {OWN}",
    f"'net/a': {COLUMN}",
    "'net/b': row: takes its part of its inputs, which the first step shows to come cut or whole",
    f"'net/c': {COLUMN}",
]


def logged(caplog, level):
    """What two trainings of one model log, by level."""
    caplog.set_level(level, "unidist")
    x, y = features(4, out=4)
    named = [layers.Dense(16, name="a"), layers.Dense(8, name="b"), Doubled(8, name="own"), layers.Dense(4, name="c")]
    model = keras.Sequential([keras.Input((12,)), *named], name="net")
    unidist.parallelize(model, model_parallel(RULES, two_by_two()))
    model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(x, y, verbose=0)
    found = {name: [r.getMessage() for r in caplog.records if r.levelname == name] for name in ("INFO", "DEBUG")}
    caplog.clear()
    return found


def test_a_model_is_told_of_once(caplog):
    assert logged(caplog, logging.WARNING) == {"INFO": [], "DEBUG": []}
    assert logged(caplog, logging.INFO) == {"INFO": INFO, "DEBUG": []}
    told = logged(caplog, logging.DEBUG)
    assert told["INFO"] == INFO
    assert set(DEBUG) <= set(told["DEBUG"])
    # Each variable and each layer once, though there are four ranks.
    assert len(told["DEBUG"]) == len(set(told["DEBUG"])) == 8 + 4


def test_backends_and_hooks_are_told_of(caplog):
    caplog.set_level(logging.DEBUG, "unidist")
    unidist.shutdown()
    unidist.use("sim", devices=4)
    told = [record.getMessage() for record in caplog.records]
    off, using, on = told
    assert off.startswith("hooks off: ")
    assert using.startswith("using 'sim' (as asked), KERAS_BACKEND=")
    assert on == f"hooks on: {off.split()[2]} attributes of Keras on 'torch' replaced"


class Ranked(layers.Layer):
    """Sorts each feature over the rows of a batch."""

    def __init__(self, width):
        super().__init__()
        self._width = width

    def call(self, x):
        return x + 0.1 * ops.sum(ops.sort(x[:, : self._width], axis=0)) if self._width else x


def warned(caplog, layer, *, gathers, callbacks=()):
    """What four steps say at WARNING."""
    caplog.set_level(logging.WARNING, "unidist")
    x, y = features(8)
    model = keras.Sequential([keras.Input((12,)), layer, layers.Dense(3)], name="net")
    unidist.parallelize(model, unidist.DataParallel())
    model.compile("sgd", "mse")
    model.fit(x, y, epochs=4, verbose=0, callbacks=list(callbacks))
    assert ("operation sort" in unidist.describe(model).why) == gathers
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_an_operation_that_gathers_much_is_told_of_once_for_each_model(caplog):
    for _ in range(2):
        (said,) = warned(caplog, Ranked(12), gathers=True)
        assert said.startswith("model 'net': no rule cuts the operation 'sort', so its operands were gathered: ")
        assert 1 < float(said.split(": ")[2].split("%")[0]) < 100
        assert "describe(model).why" in said


class Wide(layers.Layer):
    """Has many weights, whose gradients are most of what is sent."""

    def __init__(self):
        super().__init__()
        self.ranked, self.inner = Ranked(1), layers.Dense(2000)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(self.ranked(x))


def test_what_gathers_little_or_has_rules_is_not_told_of(caplog):
    """8 numbers are less than a hundredth of the gradients of 26,000 weights."""
    assert warned(caplog, Wide(), gathers=True) == []
    assert warned(caplog, layers.Lambda(lambda x: x - ops.mean(x, axis=0)), gathers=False) == []


def test_what_begins_to_gather_later_is_told_of(caplog):
    layer = Ranked(0)
    later = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(layer, "_width", 12 * (epoch > 1))
    )
    assert len(warned(caplog, layer, gathers=True, callbacks=[later])) == 1
