"""What a column layer gives stays cut as far as rules go, and the numbers are one device's whatever comes next."""

from __future__ import annotations

import queue
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.keras.torch.models import (
    PAIR,
    assert_equal,
    features,
    mlp,
    model_parallel,
    rows_of,
    train,
    two_by_two,
)

COLUMN = "column: its outputs stay cut, until an operation needs all of them"
WHOLE = "row: its inputs come whole, and each device takes its part"


def why_of(model):
    """layer -> what it does."""
    return {
        path.split("/")[-1]: why for path, why in unidist.describe(model).why.items() if not path.startswith("oper")
    }


@pytest.mark.parametrize("mesh", [None, two_by_two], ids=["4", "2x2"])
@pytest.mark.parametrize("middle", [None, lambda: layers.Activation("gelu"), lambda: layers.LeakyReLU(0.1)])
def test_features_stay_cut_between_a_column_and_a_row(middle, mesh):
    x, y = features()
    strategy = model_parallel(mesh=mesh() if mesh else None)
    found = train(lambda: mlp(middle), x, y, strategy)
    assert_equal(found, train(lambda: mlp(middle), x, y))
    assert rows_of(found.model) == ["b"]
    assert why_of(found.model) == {"a": COLUMN, "b": "row: its inputs come cut"}
    assert {row.path.split("/", 1)[1] for row in unidist.describe(found.model).sharded} >= {"a/kernel", "b/kernel"}


class Cumsum(layers.Layer):
    def call(self, x):
        return ops.cumsum(x, axis=-1)


class Halves(layers.Layer):
    """A fused projection that is split and multiplied."""

    def call(self, x):
        left, right = ops.split(x, 2, axis=-1)
        return ops.concatenate([left * ops.sigmoid(right), right], axis=-1)


class Hidden(layers.Layer):
    """A comparison hides poison: only the shapes or the numbers tell."""

    def call(self, x):
        return ops.where(ops.max(x, axis=-1, keepdims=True) > 0.5, x, 2 * x)


class Written(layers.Layer):
    """Writes through views that need all features, and goes on with what they are of."""

    def call(self, x):
        first, second = x.view(-1), ops.reshape(x, (-1, 4))
        first[:9] = 0
        y = x * 2
        second[1:3] += 1
        return x + y


TRAPS = {
    "softmax": layers.Softmax,
    "written through views": Written,
    "layer norm": layers.LayerNormalization,
    "cumsum": Cumsum,
    "fused split": Halves,
    "hidden": Hidden,
    "fixed width": lambda: layers.Reshape((16,)),
    "flip": lambda: layers.Lambda(lambda t: ops.flip(t, axis=-1)),
    # Mixes features once one of them is large: on the rows of the proof none is, and outputs are equal.
    "asleep": lambda: layers.Lambda(lambda t: t + ops.relu(ops.max(t, axis=-1, keepdims=True) - 4.0)),
}


# What of these gives its outputs cut again.
CUT_AGAIN = {"softmax", "written through views", "hidden", "asleep", "fixed width"}


@pytest.mark.parametrize("trap", TRAPS)
def test_what_looks_at_several_features_sees_all(trap):
    def trained(strategy=None):
        # Sums of sixteen numbers are large: at a higher rate it depends on the order of the rows whether they end.
        return train(
            lambda: mlp(TRAPS[trap]), *features(), strategy, optimizer=lambda: keras.optimizers.SGD(0.005, momentum=0.9)
        )

    found = trained(model_parallel())
    assert_equal(found, trained())
    assert unidist.describe(found.model).sharded
    assert rows_of(found.model) == (["b"] if trap in CUT_AGAIN else [])


class Largest(layers.Layer):
    """Keeps a number of what it is given, in a metric or in a variable that is not trained."""

    def __init__(self, in_metric, **options):
        super().__init__(**options)
        self.metric = keras.metrics.Mean(name="largest") if in_metric else None

    def build(self, shape):
        self.kept = None if self.metric else self.add_weight(shape=(), trainable=False, name="kept")

    def call(self, x):
        if self.metric:
            self.metric.update_state(ops.max(x))
        else:
            self.kept.assign(ops.maximum(self.kept, ops.max(x)))
        return x


@pytest.mark.parametrize("in_metric", [True, False], ids=["metric", "variable"])
def test_what_a_layer_keeps_of_its_inputs_is_of_whole_ones(in_metric):
    x, y = features()
    build = lambda: mlp(lambda: Largest(in_metric, name="largest"))  # noqa: E731
    found = train(build, x, y, model_parallel())
    assert_equal(found, train(build, x, y))
    assert rows_of(found.model) == ["b"]
    (first, *_) = unidist.plan(build(), unidist.Mesh({"model": 4})).rows
    assert first.reason == "column: its outputs are gathered"


def residual():
    """The column output is also used elsewhere."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a", activation="relu")(inputs)
    out = layers.Dense(16, name="b")(h)
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Add()([h, out])))


def gated_by_replicated():
    """A replicated gate multiplies the shards: outputs agree, the gate's gradient would not."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs)
    gate = layers.Dense(1, name="gate", activation="sigmoid")(inputs)
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(layers.Multiply()([h, gate]))))


@pytest.mark.parametrize("build", [residual, gated_by_replicated])
def test_a_column_that_is_used_otherwise_too(build):
    x, y = features()
    found = train(build, x, y, model_parallel())
    assert_equal(found, train(build, x, y))
    assert rows_of(found.model) == ["b"]


def gated_ffn():
    inputs = layers.Input((12,))
    gate = layers.Dense(16, name="gate", activation="silu", use_bias=False)(inputs)
    up = layers.Dense(16, name="up", use_bias=False)(inputs)
    return keras.Model(inputs, layers.Dense(3, name="down")(layers.Multiply()([gate, up])))


def test_a_gated_pair_has_two_columns():
    rules = {"gate/kernel|up/kernel": (None, "model"), "down/kernel": ("model", None)}
    x, y = features()
    found = train(gated_ffn, x, y, model_parallel(rules))
    assert_equal(found, train(gated_ffn, x, y))
    assert rows_of(found.model) == ["down"]


def test_half_a_gated_pair_takes_its_part_of_the_other_half():
    rules = {"gate/kernel": (None, "model"), "down/kernel": ("model", None)}
    x, y = features()
    found = train(gated_ffn, x, y, model_parallel(rules))
    assert_equal(found, train(gated_ffn, x, y))
    assert rows_of(found.model) == ["down"]


def attention():
    inputs = layers.Input((5, 12))
    h = layers.MultiHeadAttention(4, 3, name="mha")(inputs, inputs)
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.GlobalAveragePooling1D()(h)))


def test_attention_pairs_by_heads():
    rules = {
        "mha/(query|key|value)/kernel": (None, "model", None),
        "mha/(query|key|value)/bias": ("model", None),
        "mha/attention_output/kernel": ("model", None, None),
    }
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 12)).astype("float32")
    y = rng.normal(size=(6, 3)).astype("float32")
    found = train(attention, x, y, model_parallel(rules))
    # Attention's softmax sums in another order on fewer heads.
    assert_equal(found, train(attention, x, y))
    assert rows_of(found.model) == ["attention_output"]


def two_rows():
    """Two row layers take what one column gives."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs)
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h) + layers.Dense(8, name="b2")(h)))


LIMIT = 1.0


def scaled_where_large(h):
    """Rows in which any feature is large are halved, in all features."""
    return h * ops.where(ops.max(h, axis=-1, keepdims=True) > LIMIT, 0.5, 1.0)


def scaled():
    inputs = layers.Input((12,))
    h = scaled_where_large(layers.Dense(16, name="a")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h)))


def scaled_beside():
    """What comes from one of two columns is sound."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs) + scaled_where_large(layers.Dense(16, name="a2")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h)))


def leaking():
    """What exceeds a limit in any feature also leaves the model."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs)
    more = ops.relu(ops.max(h, axis=-1, keepdims=True) - LIMIT)
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h)) + more)


def whole_again():
    """What exceeds a limit in any feature also goes to another column layer."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs)
    more = layers.Dense(8, name="a2")(ops.relu(ops.max(h, axis=-1, keepdims=True) - LIMIT))
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h) + more))


def stepped(beyond):
    """All features move on where a single one, the second, is beyond a limit."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs)
    h = h + ops.cast(beyond(h[:, 1:2]), "float32")
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h)))


def stepped_above():
    return stepped(lambda one: one > LIMIT)


def stepped_below():
    return stepped(lambda one: one < -LIMIT)


BRANCHES = (two_rows, scaled, scaled_beside, leaking, stepped_above, stepped_below, whole_again)


@pytest.mark.parametrize("build", BRANCHES)
def test_what_only_large_numbers_show(build):
    """On the first rows, which are small, each of these gives what it would give of a rank's own features."""
    rules = {r".*(a|a2)/kernel": (None, "model"), r".*(a|a2)/bias": ("model",), r".*(b|b2)/kernel": ("model", None)}
    x, y = features(rows=8)
    x[:2] *= 0.05
    found = train(build, x, y, model_parallel(rules), shuffle=False)
    assert_equal(found, train(build, x, y, shuffle=False))
    assert rows_of(found.model)


def test_a_pair_costs_one_all_reduce_forward_and_one_backward():
    x, y = features(rows=8)
    with unidist.ledger() as traffic:
        found = train(mlp, x, y, model_parallel(), batch_size=8, epochs=3)
    assert rows_of(found.model) == ["b"]
    forward = 2 * 3 / 4 * 8 * 8 * 4  # output of b: 8 rows of 8 floats
    backward = 2 * 3 / 4 * 8 * 12 * 4  # gradient of the input of a: 8 rows of 12 floats
    steps = [e for e in traffic.events if e.purpose.endswith(("/a", "/b"))]
    # The input of the first layer needs no gradient, so only the forward half is sent here.
    assert [e.op for e in steps] == ["all_reduce"] * 3
    assert sum(e.bytes for e in steps) == 3 * forward

    def deeper():
        inputs = layers.Input((12,))
        h = layers.Dense(12, name="first")(inputs)
        return keras.Model(inputs, mlp()(h))

    with unidist.ledger() as traffic:
        train(deeper, x, y, model_parallel(), batch_size=8, epochs=3)
    steps = [e for e in traffic.events if e.purpose.endswith(("/a", "/b"))]
    assert [e.op for e in steps] == ["all_reduce"] * 6
    assert sum(e.bytes for e in steps) == 3 * (forward + backward)


def test_dropout_of_cut_features_differs_by_rank():
    """Of ones, each rank drops others; the first layer's outputs are ones."""
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()  # all ranks' own, as no list of a closure is

    class Noting(layers.Layer):
        def call(self, x):
            if hasattr(x, "local"):
                seen.put(x.local.detach().clone())
            return x

    def build():
        first = layers.Dense(16, name="a", kernel_initializer="zeros", bias_initializer="ones")
        row = layers.Dense(8, name="b")
        middle = [layers.Dropout(0.5, seed=3), Noting()]
        return keras.Sequential([layers.Input((12,)), first, *middle, row, layers.Dense(3, name="c")])

    x, y = features(rows=8)
    train(build, x, y, model_parallel(), batch_size=8, epochs=1)
    noted = [seen.get() for _ in range(seen.qsize())]
    parts = [part for part in noted if part.shape == (8, 4)][:4]
    assert len(parts) == 4
    assert all(0 < (part == 0).float().mean() < 1 for part in parts)
    assert not any(torch.equal(one, other) for k, one in enumerate(parts) for other in parts[:k])


def test_unmatched_rules_are_told():
    with pytest.raises(unidist.LayoutError, match=r"rules that match no variable.*re\.fullmatch"):
        train(mlp, *features(), model_parallel({**PAIR, "dense.*kernel": ("model", None)}))


class Apart(keras.Sequential):
    """Besides the model itself, its step calls layers of a pair one by one, and a model of its first layers."""

    shapes: ClassVar[list] = []

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        hidden = self.get_layer("a")(x)
        again = self.get_layer("b")(ops.softmax(hidden))
        self.shapes.append((tuple(hidden.shape), tuple(again.shape)))
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred + ops.mean(again) + ops.max(hidden))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


@pytest.mark.parametrize("found_layouts", [False, True])
def test_layers_that_a_step_calls_by_themselves_give_the_whole(found_layouts):
    x, y = features(4)
    Apart.shapes.clear()
    strategy = unidist.ModelParallel(unidist.Mesh({"model": 4})) if found_layouts else model_parallel()
    found = train(lambda: Apart(mlp().layers), x, y, strategy, epochs=2)
    wanted = train(lambda: Apart(mlp().layers), x, y, epochs=2)
    assert set(Apart.shapes) == {((4, 16), (4, 8))}
    assert_equal(found, wanted)


class Same(layers.Layer):
    def compute_output_shape(self, shape):
        return shape


class Training(Same):
    """Computes in training alone."""

    def call(self, x, training=None):
        if not training and not x.is_meta:
            raise ValueError("not without training")
        return 2 * x


class Quarters(Same):
    """Needs a batch of four times as many rows; gives each its difference to those that are a quarter on."""

    def call(self, x):
        groups = ops.reshape(x, (4, -1, x.shape[-1]))
        return ops.reshape(groups - ops.roll(groups, 1, axis=0), x.shape)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("middle", [Training, Quarters])
def test_layers_that_do_not_run_on_any_rows(middle, zero):
    x, y = features(rows=8)
    found = train(lambda: mlp(middle), x, y, model_parallel(mesh=two_by_two(), zero=zero), shuffle=False, batch_size=8)
    assert_equal(found, train(lambda: mlp(middle), x, y, shuffle=False, batch_size=8))
    assert rows_of(found.model) == ["b"]
