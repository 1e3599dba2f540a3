"""What describe says of layers with cut weights: what each does, and why."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unidist
from tests.keras.torch.models import features, mlp, model_parallel
from tests.keras.torch.test_subclasses import Doubled

MESH = unidist.Mesh({"model": 4})


def why_of(model, rules=None, **options):
    """What is said of a model that was placed, before its first step."""
    strategy = unidist.ModelParallel(MESH) if rules is None else model_parallel(rules, **options)
    unidist.parallelize(model, strategy)
    return dict(unidist.describe(model).why)


def alone(*made):
    """Layers one behind the other."""
    return keras.Sequential([keras.Input((8, 4)), *made], name="net")


def low_rank():
    model = alone(layers.Dense(8, name="a"))
    model.get_layer("a").enable_lora(2)
    return model


COLUMN = "column: its outputs stay cut, until an operation needs all of them"
CASES = {
    "column": (lambda: alone(layers.Dense(8, name="a")), (None, "model"), COLUMN),
    "row": (
        lambda: alone(layers.Dense(8, name="a")),
        ("model", None),
        "row: takes its part of its inputs, which the first step shows to come cut or whole",
    ),
    "uneven": (
        lambda: alone(layers.Dense(10, name="a")),
        (None, "model"),
        COLUMN,
    ),
    "regularizer": (
        lambda: alone(layers.Dense(8, name="a", activity_regularizer="l2")),
        (None, "model"),
        COLUMN,
    ),
    "low rank": (
        low_rank,
        (None, "model"),
        "column: its own operations go by rules, for it has low-rank kernels (LoRA)",
    ),
    "convolution": (
        lambda: alone(layers.Conv1D(8, 3, name="a")),
        (None, None, "model"),
        "gathered for each call: a Conv1D has no rule for shards",
    ),
    "call of its own": (
        lambda: alone(Doubled(8, name="a")),
        (None, "model"),
        "gathered for each call: a Doubled computes otherwise than the Dense that it inherits from",
    ),
    "equation": (
        lambda: alone(layers.EinsumDense("...i,ij->...ij", (4, 8), name="a")),
        ("model", None),
        "gathered for each call: its equation '...i,ij->...ij' has no rule for shards",
    ),
    "two dims": (
        lambda: alone(layers.EinsumDense("abc,cde->abde", (8, 4, 4), name="a")),
        ("model", None, "other"),
        "gathered for each call: 2 dims of its kernel are cut",
    ),
    "data axis": (
        lambda: alone(layers.Dense(8, name="a")),
        (None, "data"),
        "gathered for each call: data axes cut 'kernel'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_layer_does_is_said_before_the_first_step(case):
    build, layout, said = CASES[case]
    mesh = unidist.Mesh({"data": 1, "model": 2, "other": 2}) if "other" in layout else MESH
    mesh = unidist.Mesh({"data": 4}) if "data" in layout else mesh
    rules = unidist.LayoutMap(mesh, {"net/a/kernel": layout}, uneven=True)
    model = build()
    unidist.parallelize(model, unidist.ModelParallel(mesh, rules))
    assert unidist.describe(model).why == {"net/a": said}


def test_tables_and_others_of_their_weights():
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(16, 8, name="words"),
            layers.Dense(8, name="a"),
        ],
        name="net",
    )
    assert why_of(model, {"net/words/embeddings": ("model", None), "net/a/bias": ("model",)}) == {
        "net/words": "vocabulary: each device looks up the entries that it holds",
        "net/a": "gathered for each call: its kernel is whole, and others of its weights are cut",
    }


def test_before_and_behind_the_first_step():
    x, y = features(4)
    with unidist.ModelParallel(MESH).scope():
        # Large enough to be cut before its model is whole.
        model = keras.Sequential([keras.Input((12,)), layers.Dense(1 << 15, name="a"), layers.Dense(3, name="b")])
        model.compile("sgd", "mse")
    first = model.name
    assert unidist.describe(model).why == {f"{first}/a": "its layouts are found in the first step"}
    model.fit(x, y, verbose=0)
    assert unidist.describe(model).why == {f"{first}/a": COLUMN, f"{first}/b": "row: its inputs come cut"}
    model.get_layer("b").enable_lora(1)
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    low = "row: its own operations go by rules, for it has low-rank kernels (LoRA)"
    assert unidist.describe(model).why == {f"{first}/a": COLUMN, f"{first}/b": low}


def test_without_a_partner():
    x, y = features(4)
    for rules, name, said in (
        ({".*a/kernel": (None, "model")}, "a", COLUMN),
        ({".*b/kernel": ("model", None)}, "b", "row: its inputs come whole, and each device takes its part"),
    ):
        model = mlp()
        unidist.parallelize(model, model_parallel(rules))
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)
        assert unidist.describe(model).why[f"{model.name}/{name}"] == said


def test_values_that_rest_in_parts_are_said_to():
    model = mlp()
    unidist.parallelize(model, unidist.DataParallel(unidist.Mesh({"data": 4}), zero=3))
    said = "gathered for each call: data axes cut 'kernel' and 'bias'"
    assert unidist.describe(model).why == {f"{model.name}/{name}": said for name in "abc"}
    assert np.prod(unidist.describe(model).rows[0].local_shape) == 12 * 16 // 4
