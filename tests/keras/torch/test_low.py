"""Stored shards under a mixed policy: 16 bits are gathered, and what is trained is what whole values train.

Whole values (zero=0) of the same policy are the reference: their casts are those of one device, to the bit.
"""

from __future__ import annotations

from fractions import Fraction

import keras
import pytest
import torch
from keras import layers, ops

import unidist
from tests.keras.torch.models import assert_equal, features, train
from tests.keras.torch.test_zero import adam, even, grid, sent, trainable_bytes
from tests.support.sampling import unless_all
from unidist.keras.patching.compat import AutocastScope
from unidist.keras.torch.params import flat_buffer, param_groups
from unidist.keras.torch.params.param_group import Unit

POLICIES = ("mixed_bfloat16", "mixed_float16")


@pytest.fixture(params=POLICIES)
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


class Written(layers.Layer):
    """Writes to its weight in its call, reads it before and behind that, and once as it is stored."""

    def build(self, shape):
        self.scale = self.add_weight((shape[-1],), initializer="ones", name="scale")
        self.mix = self.add_weight((shape[-1], shape[-1]), initializer="orthogonal", name="mix")

    def call(self, x, training=False):
        before = x * self.scale
        if training:
            self.scale.assign(self.scale * 0.5 + 0.25)
        with AutocastScope(None):
            exact = ops.matmul(ops.cast(x, "float32"), self.mix)
        return before * self.scale + ops.matmul(x, self.mix) + ops.cast(exact, self.compute_dtype)


class ByRow(layers.Layer):
    """Is a function of a row, mapped over the rows."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], shape[-1]), initializer="orthogonal", name="kernel")

    def call(self, x):
        kernel = ops.convert_to_tensor(self.kernel)
        return torch.func.vmap(lambda row: torch.tanh(row @ kernel))(x)


class Lent(layers.Layer):
    """Reads another layer's kernel."""

    def __init__(self, lender, **options):
        super().__init__(**options)
        self.lender = [lender]  # no layer of this one

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.lender[0].kernel))


def dense(n, **options):
    return layers.Dense(n, "tanh", **options)


def stacked(*inner):
    return keras.Sequential([layers.Input((12,)), *inner, layers.Dense(3, dtype="float32")])


def lending():
    inputs = keras.Input((12,))
    first = dense(16)
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(Lent(first)(dense(16)(first(inputs)))))


def embedded():
    inputs = keras.Input((12,))
    table = layers.ReversibleEmbedding(8, 12)
    hidden = table(ops.cast(ops.abs(inputs) * 3, "int32"))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(layers.Flatten()(table(hidden, reverse=True))))


MODELS = {
    "dense": lambda: stacked(*(dense(16, name=name) for name in ("a", "b", "c"))),
    "normalized": lambda: stacked(dense(16), layers.LayerNormalization(), dense(8), layers.BatchNormalization()),
    "regularized": lambda: stacked(dense(16), dense(16, kernel_regularizer=keras.regularizers.L2(0.01)), dense(8)),
    "of two dtypes": lambda: stacked(dense(16), dense(16, dtype="float32"), dense(16, autocast=False), dense(8)),
    "written": lambda: stacked(dense(12), Written(), dense(8)),
    "by row": lambda: stacked(dense(12), ByRow(), dense(8)),
    "lent": lending,
    "embedded": embedded,
    "nested": lambda: stacked(dense(16), keras.Sequential([dense(16), keras.Sequential([dense(8)])]), dense(8)),
}


# Each model under both policies, in units of one size under each; the one that writes to its weights in all.
TRAINED = [
    (policy, name, unit_bytes)
    for k, name in enumerate(MODELS)
    for i, policy in enumerate(POLICIES)
    for j, unit_bytes in enumerate((1, param_groups.UNIT_BYTES))
    if unless_all(name == "written" or (i + j + k) % 2 == 0, True)
]


@pytest.mark.parametrize(("policy", "name", "unit_bytes"), TRAINED, indirect=["policy"])
def test_it_trains_as_whole_values_do(name, unit_bytes, policy, monkeypatch):
    monkeypatch.setattr(param_groups, "UNIT_BYTES", unit_bytes)
    x, y = features()
    found, wanted = (train(MODELS[name], x, y, unidist.DataParallel(zero=zero), optimizer=adam) for zero in (3, 0))
    assert_equal(found, wanted)


@pytest.mark.parametrize("loose_bytes", [1, flat_buffer.LOOSE_BYTES])
def test_cut_by_a_rule_too_it_trains_as_whole_values_do(policy, loose_bytes, monkeypatch):
    monkeypatch.setattr(flat_buffer, "LOOSE_BYTES", loose_bytes)
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    x, y = features()

    def build():
        return stacked(layers.Dense(24), layers.Dense(64, name="a"), layers.Dense(24, name="b"))

    found, wanted = (train(build, x, y, grid(zero), optimizer=adam) for zero in (3, 0))
    assert_equal(found, wanted)


def gathered(build, **options):
    """A trained model, and what one more epoch of two steps gathers of its values."""
    x, y = features(rows=8, out=4)
    trained = train(build, x, y, unidist.DataParallel(zero=3), optimizer=adam, batch_size=4, epochs=1, **options)
    with unidist.ledger() as book:
        trained.model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    return trained.model, book


def test_half_the_bytes_are_gathered_and_gradients_go_as_they_are(policy):
    model, book = gathered(even)
    once = 2 * Fraction(3, 4) * trainable_bytes(model)
    assert sent(book, "all_gather") == once / 2
    assert sent(book, "reduce_scatter") == once


def test_a_whole_weight_is_read_in_the_dtype_of_computation(policy):
    keras.utils.clear_session()  # with which Keras's state is another object
    seen = []

    class Reading(layers.Dense):
        def call(self, x):
            seen.append(ops.convert_to_tensor(self.kernel).dtype)
            return super().call(x)

    x, y = features()
    train(lambda: keras.Sequential([layers.Input((12,)), Reading(3, dtype=policy)]), x, y, unidist.DataParallel())
    # The first time Keras asks for shapes.
    assert set(seen[1:]) == {torch.bfloat16 if policy == "mixed_bfloat16" else torch.float16}


def test_what_a_regularizer_reads_is_gathered_as_it_is_stored(policy):
    def build():
        return keras.Sequential(
            [
                layers.Input((12,)),
                dense(16, kernel_regularizer="l2", bias_regularizer="l2"),
                dense(16),
                layers.Dense(4, dtype="float32"),
            ]
        )

    model, book = gathered(build)
    first, second, last = (4 * layer.count_params() for layer in model.layers)
    assert sent(book, "all_gather") == 2 * Fraction(3, 4) * (first + Fraction(second, 2) + last)


def test_nothing_of_it_stays(policy, monkeypatch):
    """Behind a step neither value has memory; in it, the one of 16 bits alone has had some."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    had = []
    need = Unit.need

    def needing(unit, storage):
        need(unit, storage)
        had.extend(value.dtype for value in unit.values if value.untyped_storage().size())

    monkeypatch.setattr(Unit, "need", needing)
    model, _ = gathered(even)
    assert set(had) == {torch.bfloat16 if policy == "mixed_bfloat16" else torch.float16}
    for variable in model.trainable_variables:
        storage = variable._storage
        values = [*storage.leaves.values(), *(low.value for low in storage.lows.values())]
        assert len(values) == 2 * len(storage.leaves)
        assert all(value.untyped_storage().size() == 0 for value in values)


def test_it_is_evaluated_and_predicts_as_whole_values_do(policy):
    x, y = features()
    results = []
    for zero in (3, 0):
        model = train(MODELS["normalized"], x, y, unidist.DataParallel(zero=zero), optimizer=adam).model
        results.append((model.evaluate(x, y, batch_size=4, verbose=0), model.predict(x, batch_size=4, verbose=0)))
    (loss, outputs), (wanted, wanted_outputs) = results
    assert loss == pytest.approx(wanted, abs=1e-5)
    assert outputs == pytest.approx(wanted_outputs, abs=1e-5)
