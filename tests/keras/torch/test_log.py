"""What is logged of a model: once what is laid out how, once which pairs are proven, and what is gathered why."""

from __future__ import annotations

import logging

import keras
from keras import layers

import unidist
from tests.keras.torch.models import features, model_parallel, two_by_two
from tests.keras.torch.test_subclasses import Doubled

RULES = {"net/a/kernel": (None, "model"), "net/b/kernel": ("model", None), "net/(own|c)/kernel": (None, "model")}
MESH = "Mesh({'data': 2, 'model': 2})"
APPLIED = f"model 'net' under ModelParallel on {MESH}: 4 of 8 variables cut, batches over 'data', zero=0"
OWN = "gathered for each call: a Doubled computes otherwise than the Dense that it inherits from"
ALONE = "column, gathered: its outputs reach the outputs of the model"
INFO = [APPLIED, f"{OWN}: 'net/own'", "model 'net': pairs proven: 1: into 'net/b'", f"{ALONE}: 'net/c'"]
DEBUG = [
    "'net/a/kernel' of shape (12, 16) rests Layout(None, 'model'), is used Layout(None, 'model', fanout='data'), is "
    "updated Layout(None, 'model'): rule 'net/a/kernel'",
    "'net/b/bias' of shape (8,) rests Layout(), is used Layout(fanout='data'), is updated Layout(): no rule",
    "'net/c/kernel' of shape (8, 4) rests Layout(None, 'model'), is used Layout(None, 'model', fanout='data'), is "
    "updated Layout(None, 'model'): rule 'net/(own|c)/kernel'",
    f"'net/own': {OWN}",
    "'net/a': column, paired with 'net/b'",
    "'net/b': row, takes shards of 'net/a'",
    f"'net/c': {ALONE}",
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
    # Each variable and each layer once, though four ranks prove the pairs.
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
