"""Column and row layers pair up where it is proven safe, and nowhere else; the numbers are right either way."""

from __future__ import annotations

import re
from typing import ClassVar

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
    pairs_of,
    said_of,
    train,
    two_by_two,
)
from unidist.keras.torch.tensor_parallel import pairs, verdicts
from unidist.keras.torch.world import rank_world


@pytest.mark.parametrize("mesh", [None, two_by_two], ids=["4", "2x2"])
@pytest.mark.parametrize("middle", [None, lambda: layers.Activation("gelu"), lambda: layers.LeakyReLU(0.1)])
def test_a_safe_pair_is_found(middle, mesh):
    x, y = features()
    strategy = model_parallel(mesh=mesh() if mesh else None)
    found = train(lambda: mlp(middle), x, y, strategy)
    assert_equal(found, train(lambda: mlp(middle), x, y))
    assert [len(pair.columns) for pair in pairs_of(found.model)] == [1]
    name = found.model.name
    assert said_of(found.model) == {"a": f"column, paired with '{name}/b'", "b": f"row, takes shards of '{name}/a'"}
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


DIFFER = (
    r"with shards between '(\w+/)?a' and '(\w+/)?b' (output 0 of the model|the gradient of '[\w/]+' \(variable \d\)) "
    r"differs by [\d.e-]+, "
    r"where rounding makes [\d.e-]+"
)
MIXED = r"(its outputs|the outputs of '\w+/a') reach '\w+/b' in other slices than their own"
TRAPS = {
    "softmax": layers.Softmax,
    "layer norm": layers.LayerNormalization,
    "cumsum": Cumsum,
    "fused split": Halves,
    "hidden": Hidden,
    "fixed width": lambda: layers.Reshape((16,)),
    "flip": lambda: layers.Lambda(lambda t: ops.flip(t, axis=-1)),
    # Mixes features once one of them is large: on the rows of the proof none is, and outputs are equal.
    "asleep": lambda: layers.Lambda(lambda t: t + ops.relu(ops.max(t, axis=-1, keepdims=True) - 4.0)),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_gathered(trap):
    def trained(strategy=None):
        # Sums of sixteen numbers are large: at a higher rate it depends on the order of the rows whether they end.
        return train(
            lambda: mlp(TRAPS[trap]), *features(), strategy, optimizer=lambda: keras.optimizers.SGD(0.005, momentum=0.9)
        )

    found = trained(model_parallel())
    assert_equal(found, trained())
    assert pairs_of(found.model) == []
    assert unidist.describe(found.model).sharded
    said = said_of(found.model)
    reason = {
        "hidden": DIFFER,
        "fixed width": "the shards do not fit where the model wants the whole: .*Reshape.*size of the tensor.*",
    }.get(trap, MIXED)
    assert re.fullmatch(f"column, gathered: {reason}", said["a"]), said["a"]
    assert re.fullmatch(f"row, gathered: {reason}", said["b"]), said["b"]


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
    assert pairs_of(found.model) == []
    assert "reach what 'largest' keeps of its inputs" in said_of(found.model)["a"]
    (first, *_) = unidist.plan(build(), unidist.Mesh({"model": 4})).rows
    assert first.reason == "column: its outputs are gathered"


def test_a_pair_is_proven_where_every_rank_says_so():
    """All ranks get the same reason: the lowest rank's, with its number where others have nothing against it."""
    world, told = rank_world(unidist.Mesh({"model": 4}), ()), []

    def ask(frame):
        alone = "" if frame.rank != 2 else "it leaks: \u00fc"
        several = f"as seen by {frame.rank}" if frame.rank in (1, 3) else ""
        told.append(verdicts.agreed(frame, ["", alone, several, f"all {frame.rank}"]))

    world.run(ask)
    assert told == [["", "it leaks: \u00fc (as rank 2 found)", "as seen by 1 (as rank 1 found)", "all 0"]] * 4


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


LEAK = "reach the outputs of the model"


@pytest.mark.parametrize(
    ("build", "column", "row"),
    [(residual, f"its outputs also {LEAK}", f"the outputs of 'a' also {LEAK}"), (gated_by_replicated, DIFFER, DIFFER)],
)
def test_a_column_that_is_used_otherwise_is_gathered(build, column, row):
    x, y = features()
    found = train(build, x, y, model_parallel())
    assert_equal(found, train(build, x, y))
    assert pairs_of(found.model) == []
    said = said_of(found.model)
    assert re.fullmatch(f"column, gathered: {column}", said["a"]), said["a"]
    assert re.fullmatch(f"row, gathered: {row}", said["b"]), said["b"]


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
    assert [len(pair.columns) for pair in pairs_of(found.model)] == [2]
    assert said_of(found.model)["down"] == "row, takes shards of 'gate' and 'up'"


def test_half_a_gated_pair_is_gathered():
    rules = {"gate/kernel": (None, "model"), "down/kernel": ("model", None)}
    x, y = features()
    found = train(gated_ffn, x, y, model_parallel(rules))
    assert_equal(found, train(gated_ffn, x, y))
    assert pairs_of(found.model) == []


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
    assert [len(pair.columns) for pair in pairs_of(found.model)] == [3]


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


SLICES = "reach 'b' in other slices than their own"
AGAINST = {
    two_rows: {"a": "its outputs reach several row layers: 'b' and 'b2'"},
    scaled: {"a": f"its outputs {SLICES}"},
    scaled_beside: {
        "a": f"'b' is gathered: the outputs of 'a2' {SLICES}",
        "a2": f"its outputs {SLICES}",
        "b": f"the outputs of 'a2' {SLICES}",
    },
    leaking: {"a": f"its outputs also {LEAK}"},
    stepped_above: {"a": f"its outputs {SLICES}"},
    stepped_below: {"a": f"its outputs {SLICES}"},
    whole_again: {"a": "its outputs also reach 'a2'", "a2": f"its outputs {LEAK}"},
}


@pytest.mark.parametrize("build", AGAINST)
def test_equal_numbers_on_the_rows_of_the_proof_are_no_proof(build):
    """On the first rows, which are small, each of these pairs would give one device's outputs and gradients."""
    rules = {r".*(a|a2)/kernel": (None, "model"), r".*(a|a2)/bias": ("model",), r".*(b|b2)/kernel": ("model", None)}
    x, y = features(rows=8)
    x[:2] *= 0.05
    found = train(build, x, y, model_parallel(rules), shuffle=False)
    assert_equal(found, train(build, x, y, shuffle=False))
    assert pairs_of(found.model) == []
    said = said_of(found.model)
    for layer, reason in AGAINST[build].items():
        assert said[layer].endswith(f", gathered: {reason}")


def leaking_by_rows():
    """The sum of the features leaves the model too, of rows that are not 0."""
    inputs = layers.Input((12,))
    h = layers.Dense(16, name="a")(inputs)
    more = ops.sum(h, axis=-1, keepdims=True) * ops.sign(ops.abs(inputs[:, :1]))
    return keras.Model(inputs, layers.Dense(3, name="c")(layers.Dense(8, name="b")(h)) + more)


@pytest.mark.parametrize(("silent", "rank"), [(slice(2, 4), 0), (slice(0, 2), 2)])
def test_all_ranks_have_the_same_reasons(monkeypatch, silent, rank):
    """On the rows of one data shard nothing speaks against the pair."""
    told = {}
    prove = pairs.prove

    def noting(model, rules, frame, x):
        found = prove(model, rules, frame, x)
        told[frame.rank] = [str(verdict) for verdict in found[1].values()]
        return found

    monkeypatch.setattr(pairs, "prove", noting)
    x, y = features(rows=4)
    x[silent] = 0
    train(leaking_by_rows, x, y, model_parallel(mesh=two_by_two()), shuffle=False)
    where = f"also {LEAK} (as rank {rank} found)"
    wanted = [f"column, gathered: its outputs {where}", f"row, gathered: the outputs of 'a' {where}"]
    assert told == dict.fromkeys(range(4), wanted)


def test_a_pair_costs_one_all_reduce_forward_and_one_backward():
    x, y = features(rows=8)
    with unidist.ledger() as traffic:
        found = train(mlp, x, y, model_parallel(), batch_size=8, epochs=3)
    assert len(pairs_of(found.model)) == 1
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


def test_dropout_between_a_pair_differs_by_shard():
    x, y = features()
    found = train(lambda: mlp(lambda: layers.Dropout(0.5, seed=3)), x, y, model_parallel())
    (pair,) = pairs_of(found.model)
    assert [type(layer).__name__ for layer in pair.random] == ["Dropout"]


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
def test_layers_of_a_pair_that_a_step_calls_by_themselves_give_the_whole(found_layouts):
    x, y = features(4)
    Apart.shapes.clear()
    strategy = unidist.ModelParallel(unidist.Mesh({"model": 4})) if found_layouts else model_parallel()
    found = train(lambda: Apart(mlp().layers), x, y, strategy, epochs=2)
    assert len(pairs_of(found.model)) == 1
    wanted = train(lambda: Apart(mlp().layers), x, y, epochs=2)
    assert set(Apart.shapes) == {((4, 16), (4, 8))}
    assert_equal(found, wanted)


def test_pairs_that_do_not_go_together_are_not_all_in_use(monkeypatch):
    """Each is right alone; the second is gathered."""
    alone = pairs._against

    def against(model, tried, *rest):
        return alone(model, tried, *rest) if len(tried) == 1 else "they differ"

    monkeypatch.setattr(pairs, "_against", against)

    def build():
        widths = {"a": 16, "b": 8, "c": 16, "d": 3}
        return keras.Sequential([layers.Input((12,)), *(layers.Dense(n, "tanh", name=k) for k, n in widths.items())])

    x, y = features()
    rules = {".*[ac]/kernel": (None, "model"), ".*[bd]/kernel": ("model", None)}
    found = train(build, x, y, model_parallel(rules))
    assert_equal(found, train(build, x, y))
    assert len(pairs_of(found.model)) == 1
    said = said_of(found.model)
    assert said["c"] == "column, gathered: they differ"
    assert said["b"].startswith("row, takes shards of")


class Same(layers.Layer):
    def compute_output_shape(self, shape):
        return shape


class Training(Same):
    """Computes in training alone; the proof runs the model as in inference."""

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
def test_a_model_that_does_not_run_on_so_few_rows(middle, zero):
    """It is proven on as many as a batch has; where that fails too it gathers, and the reason is told."""
    x, y = features(rows=8)
    found = train(lambda: mlp(middle), x, y, model_parallel(mesh=two_by_two(), zero=zero), shuffle=False, batch_size=8)
    assert_equal(found, train(lambda: mlp(middle), x, y, shuffle=False, batch_size=8))
    assert len(pairs_of(found.model)) == (middle is Quarters)
    why = "does not run on a few rows of its first batch: Exception encountered when calling Training.* not without tr"
    wanted = "paired with|takes shards of" if middle is Quarters else why
    assert all(re.search(wanted, said) for said in said_of(found.model).values())
