"""What a layer does with its cut kernel: known by its class, and on a shard only what treats each element alone."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import unidist
from tests.keras.torch.models import assert_equal, features, model_parallel, rows_of, train
from unidist.keras.records import model_record

COLUMNS = {".*a/kernel": (None, "model")}
ROWS = {".*a/kernel": ("model", None)}


def total_of_squares(x):
    """An activation without a name that Keras knows: it looks at all elements."""
    return x / (1 + ops.sum(ops.square(x), axis=-1, keepdims=True))


LASTS = {
    "dense": lambda given: layers.Dense(8, given, name="a"),
    "einsum": lambda given: layers.EinsumDense("bi,io->bo", (8,), given, "o", name="a"),
}


@pytest.mark.parametrize(
    ("last", "activation", "kind"),
    [
        ("dense", "softmax", "column"),
        ("dense", "softmax", "row"),
        ("dense", total_of_squares, "column"),
        ("einsum", "softmax", "column"),
    ],
)
def test_an_activation_of_all_units_gets_them_all(last, activation, kind):
    """At the model's end, where no row layer could take its shards."""
    x, y = features(out=8)

    def build():
        return keras.Sequential([layers.Input((12,)), LASTS[last](activation)])

    found = train(build, x, y, model_parallel(COLUMNS if kind == "column" else ROWS))
    assert_equal(found, train(build, x, y))
    assert [rule.kind for rule in model_record.of(found.model).engine.rules] == [kind]


class OwnCall(layers.Dense):
    def call(self, x):
        return ops.softmax(super().call(x))


class OwnInvocation(layers.Dense):
    def __call__(self, x, **options):
        return super().__call__(x / 2, **options)


class OwnKernel(layers.Dense):
    """Kernels whose columns sum up to nothing."""

    @property
    def kernel(self):
        return self._kernel - ops.mean(self._kernel, axis=1, keepdims=True)


class OwnEinsum(layers.EinsumDense):
    def call(self, x):
        return ops.flip(super().call(x), axis=-1)


class OwnEmbeddings(layers.Embedding):
    def call(self, x):
        return ops.softmax(super().call(x))


class Renamed(layers.Dense):
    """All its computing is Dense's."""


OWN = {
    "call": lambda: OwnCall(16, name="a"),
    "invocation": lambda: OwnInvocation(16, name="a"),
    "kernel": lambda: OwnKernel(16, name="a", use_bias=False),
    "einsum": lambda: OwnEinsum("bi,io->bo", (16,), name="a"),
}


@pytest.mark.parametrize("rules", [COLUMNS, ROWS], ids=["columns", "rows"])
@pytest.mark.parametrize("name", OWN)
def test_a_subclass_that_computes_otherwise_gathers_its_weights(name, rules):
    x, y = features()

    def build():
        return keras.Sequential([layers.Input((12,)), OWN[name](), layers.Dense(3, name="c")])

    found = train(build, x, y, model_parallel(rules))
    assert_equal(found, train(build, x, y))
    assert [rule.kind for rule in model_record.of(found.model).engine.rules] == ["gather"]


@pytest.mark.parametrize("rule", [("model", None), (None, "model")])
def test_a_table_that_computes_otherwise_gathers_its_weights(rule):
    def build():
        table = OwnEmbeddings(8, 4, name="a")
        return keras.Sequential([layers.Input((5,), dtype="int32"), table, layers.Flatten(), layers.Dense(3, name="c")])

    x = np.arange(50).reshape(10, 5) % 8
    _, y = features()
    found = train(build, x, y, model_parallel({".*a/embeddings": rule}))
    assert_equal(found, train(build, x, y))
    assert [rule.kind for rule in model_record.of(found.model).engine.rules] == ["gather"]


def test_a_subclass_that_computes_alike_keeps_its_rule():
    x, y = features()

    def build():
        return keras.Sequential(
            [layers.Input((12,)), Renamed(16, "relu", name="a"), Renamed(8, name="b"), layers.Dense(3, name="c")]
        )

    found = train(build, x, y, model_parallel())
    assert_equal(found, train(build, x, y))
    assert rows_of(found.model) == ["b"]


def test_models_that_share_a_layer_call_it_by_one_rule():
    """However often each is prepared: of two rules each call would go through both."""
    x, y = features(out=16)
    with model_parallel(COLUMNS).scope():
        shared = layers.Dense(16, name="a")
        models = [keras.Sequential([layers.Input((12,)), shared], name=name) for name in ("one", "other")]
    for model in models:
        model.compile("sgd", "mse")
    for model in 2 * models:
        model.fit(x, y, batch_size=4, verbose=0)
    (rule,), (others,) = (model_record.of(model).engine.rules for model in models)
    assert rule.kind == "column"
    assert rule is others


class NamesWithin(layers.Layer):
    """Two weights of one shape; the name of the first begins that of the second."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 12), name="w")
        self.w_b = self.add_weight(shape=(shape[-1], 12), name="w_b")

    def call(self, x):
        return x @ self.w + x @ self.w_b


def test_a_slot_lies_as_its_own_variable():
    """Also of an optimizer that was built before, where another's name begins the variable's."""
    x, y = features(out=12)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((12,)), NamesWithin(name="n")])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    grid = unidist.Mesh({"model": 4})
    unidist.parallelize(model, unidist.ModelParallel(grid, unidist.LayoutMap(grid, {".*n/w": (None, "model")})))
    model.fit(x, y, batch_size=4, verbose=0)
    lies = {row.path.rsplit("/", 1)[1]: row.local_shape for row in unidist.describe(model).rows if row.local_shape[1:]}
    assert {name: shape for name, shape in lies.items() if "w" in name} == {
        "w": (12, 3),
        "w_b": (12, 12),
        **{name: (12, 12) if "w_b" in name else (12, 3) for name in lies if "momentum" in name},
    }
    assert len([name for name in lies if "momentum" in name]) == 2
