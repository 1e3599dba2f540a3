"""Plans of models of many kinds: what is cut, what is paired, what is not, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

import unidist
from tests.planner import zoo

MESH = unidist.Mesh({"model": 4})
FEEDFORWARD = {"llama": 3, "llama_mqa": 3, "mistral": 3, "gemma": 3, "gemma_mqa": 3, "t5": 3}
# Pairs of a layer, in all: attention and feed-forward, of two blocks; encoder-decoders have two and two with three.
PAIRS = {"t5": 10, "bart": 10, "albert": 2}


@pytest.fixture(scope="module")
def plans() -> dict[str, unidist.Plan]:
    return {}


def planned(plans, name: str) -> unidist.Plan:
    if name not in plans:
        plans[name] = unidist.plan(zoo.backbone(name), MESH)
    return plans[name]


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning")
@pytest.mark.parametrize("name", zoo.BACKBONES)
def test_every_block_is_paired(plans, name) -> None:
    plan = planned(plans, name)
    assert len(plan.pairs) == PAIRS.get(name, 4), plan.pairs
    sizes = {len(pair) - 1 for pair in plan.pairs}
    attention = 1 if name.endswith("mqa") or name == "gpt_neox" else 3
    assert sizes == {attention, FEEDFORWARD.get(name, 2) - 1}
    # Added once, to the sum.
    biases = [row for row in plan.rows if row.path in {f"{pair[-1]}/bias" for pair in plan.pairs}]
    assert {row.layout for row in biases} <= {unidist.Layout()}
    # A row reduces its outputs once forward, and its columns' common input once backward.
    assert plan.predicted.count("all_reduce") >= 2 * len(plan.pairs)
    if name in zoo.MOSTLY_SHARDED:
        assert plan.sharded_fraction >= 0.95


def test_keys_of_one_head_are_cut_by_their_features(plans) -> None:
    plan = planned(plans, "llama_mqa")
    attention = "transformer_layer_0/self_attention"
    rows = {row.path: row for row in plan.rows}
    assert rows[f"{attention}/query/kernel"].reason.startswith("column: first of a pair")
    key = rows[f"{attention}/key/kernel"]
    assert key.layout == unidist.Layout(None, None, "model")
    assert key.reason.startswith("column: its outputs are gathered, (32, 1, 4) has no 4 equal parts that meet")
    # Joined forward, its gradient summed and cut backward: together what an all_reduce of it would send.
    sent = [(e.op, e.bytes) for e in plan.predicted.events if e.purpose == f"{attention}/key"]
    size = plan.batch * plan.sequence * 4 * 4
    assert sent == [("all_gather", size * 3 // 4), ("reduce_scatter", size * 3 // 4)]


def test_heads_that_do_not_divide_keep_queries_and_keys_out_of_the_pair() -> None:
    plan = unidist.plan(zoo.backbone("gpt2", num_heads=2), MESH)
    attention = "transformer_layer_0/self_attention"
    # Values may be cut along their features all the same: attention only adds them up.
    assert plan.pairs[0] == (f"{attention}/value", f"{attention}/attention_output")
    rows = {row.path: row for row in plan.rows}
    query = rows[f"{attention}/query/kernel"]
    assert (str(query.layout), query.reason) == ("Layout(None, None, 'model')", "column: its outputs are gathered")
    assert plan.sharded_fraction >= 0.95


def test_a_vocabulary_that_does_not_divide_is_cut_by_its_features() -> None:
    plan = unidist.plan(zoo.backbone("bert", vocabulary_size=63), MESH)
    table = plan.rows[0]
    assert (table.layout, table.reason) == (unidist.Layout(None, "model"), "features: 63 entries do not divide by 4")


@pytest.mark.parametrize(("name", "keys"), [("llama", 4), ("llama", 2), ("llama", 1), ("gemma", 4)])
def test_no_more_bytes_than_keras_hubs_own_map(name, keys) -> None:
    import keras

    model = zoo.backbone(name, num_key_value_heads=keys)
    mesh = keras.distribution.DeviceMesh((1, 4), ["batch", "model"], [f"cpu:{k}" for k in range(4)])
    unidist.use("sim", devices=4)
    theirs = unidist.plan(model, mesh, type(model).get_layout_map(mesh))
    ours = unidist.plan(model, mesh)
    assert ours.bytes_per_device <= theirs.bytes_per_device
    assert ours.predicted.bytes() <= theirs.predicted.bytes()


# Traps: what looks like a column and a row, and is none. --------------------------------------------------------------


def dense_then(between, width: int = 16):
    import keras

    x = keras.Input((8,))
    y = between(keras.layers.Dense(width, name="first")(x))
    return keras.Model(x, keras.layers.Dense(8, name="second")(y), name="trap")


def fused(y):
    import keras

    left, right = keras.ops.split(y, 2, axis=-1)
    return left * right


def traps() -> dict[str, object]:
    from keras import layers, ops

    return {
        "softmax": layers.Softmax(),
        "split": fused,
        "sum before": lambda y: ops.cumsum(y, axis=-1),
        "sum behind": lambda y: ops.flip(ops.cumsum(ops.flip(y, -1), axis=-1), -1),
        "normalization": layers.LayerNormalization(),
        "shift": lambda y: ops.roll(y, 4, axis=-1),
        "rotation of the middle": lambda y: ops.take(y, [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)], -1),
        "scale of all": lambda y: y * ops.mean(y, axis=-1, keepdims=True),
    }


@pytest.mark.parametrize("trap", range(8))
def test_traps_are_no_pairs(trap) -> None:
    name, between = list(traps().items())[trap]
    assert unidist.plan(dense_then(between), MESH).pairs == (), name


def test_a_model_of_short_sequences_is_run_on_short_ones() -> None:
    plan = unidist.plan(zoo.backbone("gpt2", max_sequence_length=5), MESH, sequence=4, batch=2)
    assert len(plan.pairs) == 4
    # Of each block the two rows' sums forward and the columns' backward: 2 rows of 4 places of 32 numbers.
    sums = [e for e in plan.predicted.events if "transformer_layer_1" in e.purpose]
    assert [(e.op, e.bytes) for e in sums] == [("all_reduce", 2 * 3 * 2 * 4 * 32 * 4 // 4)] * 4


def test_what_treats_each_feature_alone_is_a_pair() -> None:
    import keras

    plan = unidist.plan(dense_then(keras.layers.Activation("gelu")), MESH)
    assert plan.pairs == (("first", "second"),)
    assert [str(row.layout) for row in plan.rows] == [
        "Layout(None, 'model')",
        "Layout('model')",
        "Layout('model')",
        "Layout()",
    ]


def test_a_first_layer_that_mixes_its_features_is_no_column() -> None:
    import keras

    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "softmax", name="a"), keras.layers.Dense(8, name="b")]
    )
    assert unidist.plan(model, MESH).pairs == ()


def test_a_subclass_with_its_own_call_may_mix_its_features() -> None:
    import keras

    class OwnDense(keras.layers.Dense):  # type: ignore[misc]
        def call(self, x):
            return keras.ops.softmax(super().call(x))

    class OwnEinsum(keras.layers.EinsumDense):  # type: ignore[misc]
        def call(self, x):
            return keras.ops.flip(super().call(x), axis=-1)

    class OwnTable(keras.layers.Embedding):  # type: ignore[misc]
        def call(self, x):
            return keras.ops.matmul(keras.ops.one_hot(x, self.input_dim), self.embeddings)

    for first in (OwnDense(16, name="a"), OwnEinsum("bi,io->bo", (16,), name="a")):
        model = keras.Sequential([keras.Input((8,)), first, keras.layers.Dense(8, name="b")])
        assert unidist.plan(model, MESH).pairs == ()
    table = unidist.plan(keras.Sequential([keras.Input((4,), dtype="int32"), OwnTable(16, 6)]), MESH).rows[0]
    assert (table.layout, table.reason) == (unidist.Layout("model"), "gathered: for each call of its layer")


def test_two_products_that_take_one_output_are_no_rows() -> None:
    import keras

    x = keras.Input((8,))
    y = keras.layers.Dense(16, name="first")(x)
    ends = [keras.layers.Dense(8, name=name)(y) for name in ("left", "right")]
    assert unidist.plan(keras.Model(x, ends[0] + ends[1]), MESH).pairs == ()


def test_an_output_that_also_leaves_the_model_is_no_pair() -> None:
    import keras

    x = keras.Input((8,))
    y = keras.layers.Dense(16, name="first")(x)
    model = keras.Model(x, [y, keras.layers.Dense(8, name="second")(y)])
    assert unidist.plan(model, MESH).pairs == ()


def test_a_kernel_that_another_layer_reads_is_no_pair() -> None:
    import keras

    class Reads(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, other) -> None:
            super().__init__()
            self.read = lambda: other.kernel

        def call(self, x):
            return x + keras.ops.mean(self.read())

    second = keras.layers.Dense(8, name="second")
    x = keras.Input((8,))
    y = keras.layers.Dense(16, name="first")(x)
    model = keras.Model(x, Reads(second)(second(y)))
    assert unidist.plan(model, MESH).pairs == ()


def test_a_chain_is_paired_two_by_two() -> None:
    import keras

    layers = [keras.layers.Dense(16, "relu", name=f"d{k}") for k in range(5)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="chain")
    assert unidist.plan(model, MESH).pairs == (("chain/d0", "chain/d1"), ("chain/d2", "chain/d3"))


def test_pairs_across_blocks_of_one_kind() -> None:
    import keras

    class Block(keras.layers.Layer):
        def __init__(self, units: int, **options: str) -> None:
            super().__init__(**options)
            self.dense = keras.layers.Dense(units, "relu", name="dense")

        def build(self, shape: tuple[int, ...]) -> None:
            self.dense.build(shape)

        def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
            return self.dense(x)

    blocks = [Block(units, name=name) for units, name in ((16, "a"), (8, "b"), (16, "c"), (8, "d"))]
    plan = unidist.plan(keras.Sequential([keras.Input((8,)), *blocks], name="stack"), MESH)
    assert plan.pairs == (("stack/a/dense", "stack/b/dense"), ("stack/c/dense", "stack/d/dense"))


def perceptrons(**mixes: bool):  # type: ignore[no-untyped-def]
    """A stack of blocks of two Dense layers each; name -> whether what is between mixes its features."""
    import keras

    class Block(keras.layers.Layer):
        def __init__(self, mixes: bool, **options: str) -> None:
            super().__init__(**options)
            self.mixes = mixes
            self.up, self.down = keras.layers.Dense(16, name="up"), keras.layers.Dense(8, name="down")

        def build(self, shape: tuple[int, ...]) -> None:
            self.up.build(shape)
            self.down.build((*shape[:-1], 16))

        def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
            hidden = self.up(x)
            return self.down(keras.ops.softmax(hidden) if self.mixes else hidden)

    blocks = [Block(mixed, name=name) for name, mixed in mixes.items()]
    return keras.Sequential([keras.Input((8,)), *blocks], name="stack")


def test_layers_that_are_set_otherwise_are_asked_each() -> None:
    model = perceptrons(alone=False, mixed=True)
    assert unidist.plan(model, MESH).pairs == (("stack/alone/up", "stack/alone/down"),)


def test_layers_of_one_kind_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidist.keras.planning.reach import Reacher

    asked, ask = [], Reacher._ask

    def counting(self, layer, *rest):  # type: ignore[no-untyped-def]
        asked.append(layer.name)
        return ask(self, layer, *rest)

    monkeypatch.setattr(Reacher, "_ask", counting)
    assert len(unidist.plan(perceptrons(a=False, b=False, c=False), MESH).pairs) == 3
    assert [name for name in asked if name != "stack"] == ["a", "a"]


def test_a_class_with_a_call_of_its_own_is_no_product() -> None:
    import keras

    class Own(keras.layers.Dense):
        def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
            return keras.ops.softmax(super().call(x))

    model = keras.Sequential([keras.Input((8,)), Own(16, name="own"), keras.layers.Dense(8, name="dense")])
    assert unidist.plan(model, MESH).pairs == ()


def test_gates_are_not_cut() -> None:
    import keras

    model = keras.Sequential([keras.Input((6, 8)), keras.layers.LSTM(12), keras.layers.Dense(4)])
    plan = unidist.plan(model, MESH)
    kernels = [row.layout for row in plan.rows if row.path.endswith("kernel") and "lstm" in row.path]
    assert kernels == [unidist.Layout("model")] * 2
    model = keras.Sequential([keras.Input((6, 7)), keras.layers.LSTM(12), keras.layers.Dense(4)])
    rows = unidist.plan(model, MESH).rows
    for name, dim in (("cell/kernel", 1), ("cell/bias", 0)):
        row = next(row for row in rows if row.path.endswith(name))
        assert (row.layout, row.reason) == (
            unidist.Layout(),
            f"replicated: a cut of dim {dim} would run through gates",
        )


# What a plan says. ----------------------------------------------------------------------------------------------------


@pytest.fixture
def by_closed_forms(monkeypatch) -> None:
    """What layers send is estimated, as for Keras on JAX."""
    monkeypatch.setattr("unidist.keras.torch.driver.rehearse", lambda *step: "a compiler chooses")


def rehearsed_and_estimated(model, **options) -> list[unidist.Plan]:
    mesh = unidist.Mesh({"data": 2, "model": 4})
    plans = [unidist.plan(model, mesh, **options)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unidist.keras.torch.driver.rehearse", lambda *step: "a compiler chooses")
        plans.append(unidist.plan(model, mesh, **options))
    assert [plan.estimated for plan in plans] == ["", "a compiler chooses"]
    assert plans[1].show().endswith("the collectives are an estimate: a compiler chooses\n")
    return plans


def test_traffic_is_that_of_the_rules() -> None:
    import keras

    plan, estimate = rehearsed_and_estimated(dense_then(keras.layers.Activation("relu")), batch=9)
    # 5 rows on the first device: 8 outputs of the row forward; then the gradients.
    held = (8 * 16 // 4 + 16 // 4 + 16 * 8 // 4 + 8) * 4
    forward = ("all_reduce", ("model",), 2 * 3 * 5 * 8 * 4 // 4)
    assert [(e.op, e.axes, e.bytes) for e in plan.predicted.events] == [forward, ("all_reduce", ("data",), held)]
    # That a batch needs no gradient is not known there: 8 inputs of the column backward.
    assert [(e.op, e.axes, e.bytes) for e in estimate.predicted.events] == [
        forward,
        forward,
        ("all_reduce", ("data",), held),
    ]
    assert (plan.bytes_per_device, plan.gradient_bytes_per_device, plan.slot_bytes_per_device) == (held, held, 2 * held)


def test_an_axis_of_contexts_is_not_idle() -> None:
    import keras

    def model(features: int) -> keras.Model:
        given = keras.Input((None, 8))
        return keras.Model(given, keras.layers.Dense(features)(given))

    assert unidist.plan(model(8), unidist.Mesh({"context": 4})).idle == ""
    idle = unidist.plan(model(7), unidist.Mesh({"context": 2, "model": 3})).idle
    assert idle.startswith("nothing is cut over model=3: ")
    assert unidist.plan(model(8), unidist.Mesh({"time": 2, "data": 1}), context_axis="time").context_axes == ("time",)


def test_what_parts_of_sequences_send_and_keep_is_estimated(by_closed_forms: None) -> None:
    """12 places on each of 2 devices of a mesh of 2 x 4: the row layer's sum, and the sums of gradients."""
    import keras

    given = keras.Input((None, 8))
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(8)]
    model = keras.Model(given, layers[1](layers[0](given)))
    whole, plan = (
        unidist.plan(model, unidist.Mesh(sizes), batch=2, sequence=24)
        for sizes in ({"model": 4}, {"context": 2, "model": 4})
    )
    held = (8 * 16 // 4 + 16 // 4 + 16 * 8 // 4 + 8) * 4
    sums = [(e.op, e.bytes) for e in plan.predicted.events if e.axes == ("context",)]
    assert sums == [("all_reduce", held)]
    of_rows = {e.bytes for e in plan.predicted.events if e.axes == ("model",)}
    assert of_rows == {2 * 3 * 2 * 12 * 8 * 4 // 4}
    assert plan.activation_bytes_per_device * 2 == whole.activation_bytes_per_device


def test_states_spread_over_the_data_axis_are_counted_so() -> None:
    import keras

    model, mesh = dense_then(keras.layers.Activation("relu")), unidist.Mesh({"data": 2, "model": 4})
    held = (8 * 16 // 4 + 16 // 4 + 16 * 8 // 4 + 8) * 4

    def of_data(zero: int) -> tuple[unidist.Plan, list[tuple[str, int]]]:
        plan = unidist.plan(model, mesh, zero=zero)
        return plan, [(e.op, int(e.bytes)) for e in plan.predicted.events if e.axes == ("data",)]

    plan, sent = of_data(1)
    held_of = (plan.bytes_per_device, plan.gradient_bytes_per_device, plan.slot_bytes_per_device)
    assert held_of == (held, held // 2, held)
    assert sent == [("all_gather", held // 2), ("reduce_scatter", held // 2)]
    plan, sent = of_data(3)
    held_of = (plan.bytes_per_device, plan.gradient_bytes_per_device, plan.slot_bytes_per_device)
    assert held_of == (held // 2, held // 2, held)
    # One unit, which is there when backward comes to it.
    assert sent == [("all_gather", held // 2), ("reduce_scatter", held // 2)]
    assert "each device, zero=3" in plan.show()
    # The rules are the model axes' alone: the stage is the strategy's.
    assert dict(plan.layout_map) == dict(of_data(0)[0].layout_map)


def sent_over_model(model, **options) -> list[tuple[str, str, float]]:  # type: ignore[no-untyped-def]
    plan = unidist.plan(model, unidist.Mesh({"model": 2}), **options)
    return [(e.op, e.purpose, float(e.bytes)) for e in plan.predicted.events]


@pytest.mark.parametrize("rehearsed", [True, False])
def test_what_has_no_rows_is_sent_once(rehearsed: bool, request: pytest.FixtureRequest) -> None:
    import keras

    class Places(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(5, 8, name="table")

        def build(self, shape) -> None:
            self.table.build((1, 5))

        def call(self, x):
            return x + self.table(keras.ops.arange(5)[None])

    if not rehearsed:
        request.getfixturevalue("by_closed_forms")
    model = keras.Sequential([keras.Input((5, 8)), Places()])
    # Half of (1, 5, 8) floats, for any number of rows.
    for batch in (4, 64):
        assert [size for _, _, size in sent_over_model(model, batch=batch)] == [5 * 8 * 4 / 2]


@pytest.mark.usefixtures("by_closed_forms")
def test_calls_of_one_layer_are_counted_each() -> None:
    import keras

    x, y = keras.Input((3, 8)), keras.Input((5, 8))
    dense = keras.layers.Dense(8, name="dense")
    model = keras.Model(
        [x, y], keras.layers.Concatenate(1)([dense(x), keras.layers.Dense(8, name="other")(y), dense(y)])
    )
    sent = sent_over_model(model, batch=2)
    taken = {(why, size) for op, why, size in sent if op == "all_reduce"}
    # The second layer takes what the first has taken: its gradient is summed once.
    assert taken == {("dense", 2 * 3 * 8 * 4.0), ("dense", 2 * 5 * 8 * 4.0)}
    assert [size for op, why, size in sent if (op, why) == ("all_gather", "dense")] == [2 * 3 * 8 * 2, 2 * 5 * 8 * 2]


@pytest.mark.usefixtures("by_closed_forms")
def test_a_gathered_layers_bias_is_gathered_too() -> None:
    import keras

    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, name="conv")])
    sent = {why: size for _, why, size in sent_over_model(model)}
    assert sent == {f"{model.name}/conv/kernel": 3 * 3 * 3 * 4 * 2, f"{model.name}/conv/bias": 4 * 2}


def test_parts_of_three_numbers_move_as_four() -> None:
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, use_bias=True)])
    plan = unidist.plan(model, unidist.Mesh({"data": 2}), zero=1)
    assert {int(e.bytes) for e in plan.predicted.events} == {(8 * 3 + 4) * 4 // 2}


def test_a_plan_leaves_no_variable_waiting_for_values() -> None:
    import keras
    from keras.src.backend.common import global_state

    unidist.plan(dense_then(keras.layers.Activation("relu")), MESH)
    assert not global_state.get_global_attribute("uninitialized_variables", [])


def fitted_elsewhere() -> None:
    """What Keras does where any model is fitted: the last stateless scope ends."""
    import keras

    with keras.StatelessScope():
        pass


def test_a_planned_model_without_values_is_let_go() -> None:
    """Keras's list of what waits for values alone held it, and a fit of another model filled it."""
    import gc
    import weakref

    import keras

    with keras.StatelessScope(initialize_variables=False):
        model = dense_then(keras.layers.Activation("relu"))
    kernel = weakref.ref(model.variables[0])
    assert unidist.plan(model, MESH).pairs
    kept = model.variables[1]
    del model
    gc.collect()
    assert kernel() is None
    assert kept._value is None
    fitted_elsewhere()
    # What somebody still has may be used.
    assert kept._value is not None


def test_a_model_of_the_command_never_gets_values() -> None:
    import keras

    from unidist.keras.planning.command import build

    model = build(lambda: dense_then(keras.layers.Activation("relu")))
    fitted_elsewhere()
    assert [v._value for v in model.variables] == [None] * 4
    assert unidist.plan(model, MESH).pairs


@pytest.mark.parametrize("name", ["adafactor", "nadam"])
def test_optimizers_that_make_variables_of_their_own_are_counted(name) -> None:
    """Besides slots: constants, and factors of other shapes."""
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile(name, "mse")
    sizes = [row.slot_bytes_per_device for row in unidist.plan(model, unidist.Mesh({"model": 2})).rows]
    assert all(size > 0 for size in sizes)


def test_rules_that_do_not_fit_are_told_together() -> None:
    model = zoo.backbone("bert")
    rules = unidist.LayoutMap(
        MESH,
        {
            ".*query/kernel": (None, "model"),
            ".*self_attention_layer/query.*": (None, "model"),
            "nothing": ("model",),
            ".*pooled_dense/bias": (None, None, "model"),
            ".*segment_embedding/embeddings": ("model",),
        },
    )
    with pytest.raises(unidist.LayoutError) as caught:
        unidist.plan(model, MESH, rules)
    text = str(caught.value)
    for part in ("matches several rules", "match no variable: ['nothing']", "pooled_dense/bias", "does not divide"):
        assert part in text


def test_a_plans_map_comes_back_from_text_and_gives_the_same_plan(plans) -> None:
    plan = planned(plans, "bert")
    text = plan.layout_map.to_json()
    again = unidist.LayoutMap.from_json(text)
    assert dict(again.items()) == dict(plan.layout_map.items())
    second = unidist.plan(zoo.backbone("bert"), MESH, again)
    assert second.pairs == plan.pairs
    assert second.bytes_per_device == plan.bytes_per_device
    assert second.predicted.rows() == plan.predicted.rows()
    with pytest.raises(unidist.LayoutError, match="no LayoutMap that to_json wrote"):
        unidist.LayoutMap.from_json("{}")


def test_show_names_variables_layouts_bytes_and_traffic(plans) -> None:
    text = planned(plans, "bert").show(200)
    for part in ("pooled_dense/kernel", "split on dim 1 over model", "first of a pair", "slots of Adam", "all_reduce"):
        assert part in text


def test_a_model_that_cannot_be_run_says_what_to_do() -> None:
    import keras

    class Breaks(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x):
            raise RuntimeError("not for rows like these")

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    x = keras.Input((8,))
    model = keras.Model(x, keras.layers.Dense(8)(Breaks()(x)))
    with pytest.raises(unidist.LayoutError, match=r"of 2, 12, 48 and 240 rows .* not for rows like these\. .*inputs="):
        unidist.plan(model, MESH)
    with pytest.raises(unidist.LayoutError, match="is not built"):
        unidist.plan(keras.Sequential([keras.layers.Dense(2)]), MESH)


def test_a_layer_that_needs_a_long_sequence_is_run_on_one() -> None:
    """As a spectrum of sound is made in windows."""
    import keras

    sound, spectrum = keras.Input((None, 1)), keras.layers.STFTSpectrogram("magnitude", 512, 256, 512)
    up, down = keras.layers.Dense(16, "relu", name="up"), keras.layers.Dense(4, name="down")
    plan = unidist.plan(keras.Model(sound, down(up(spectrum(sound)))), MESH)
    assert plan.pairs == (("up", "down"),)


@pytest.mark.parametrize("groups", [2, 4, 16, 20, 7])
def test_a_layer_that_needs_its_batch_to_divide_is_run_on_more_rows(groups: int) -> None:
    """No number of the planner's own divides into seven: the user's batch does, or the number of rows of the inputs."""
    import keras

    class Across(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x):
            parts = keras.ops.reshape(x, (groups, -1, x.shape[-1]))
            return keras.ops.reshape(parts - keras.ops.mean(parts, axis=0), keras.ops.shape(x))

        def compute_output_shape(self, shape):
            return shape

    def build(rows):
        x = keras.Input((8,), rows)
        paired = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, name="up")(x))
        return keras.Model(x, keras.layers.Dense(4, name="head")(Across()(paired)))

    batch, found = np.ones((3 * groups, 8), "float32"), []
    if groups == 7:
        with pytest.raises(unidist.LayoutError, match=r"12, 48 and 240 rows .*inputs="):
            unidist.plan(build(None), MESH)
        found += [unidist.plan(build(None), MESH, inputs=batch), unidist.plan(build(14), MESH)]
    else:
        found += [unidist.plan(build(None), MESH)]
    for plan in found:
        assert plan.pairs == (("up", "down"),)
        # Of one row, however many were run.
        assert plan.activation_bytes_per_device == plan.batch * 4 * (8 + 16 // 4 + 8)


def test_a_plan_takes_one_thread_of_torch_and_leaves_them_as_they_were() -> None:
    import keras

    if keras.config.backend() != "torch":
        pytest.skip("the threads of another backend's ops are its own")
    import torch

    seen: set[int] = set()

    class Looks(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x):
            seen.add(torch.get_num_threads())
            return x

    x = keras.Input((8,))
    model = keras.Model(x, keras.layers.Dense(8)(Looks()(x)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen.clear()
    try:
        unidist.plan(model, MESH)
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shape", "sequence", "said"),
    [((8,), None, "one training step of 32 rows\n"), ((None, 8), 16, "of 32 rows, sequence length 16\n")],
)
def test_a_length_is_said_where_the_model_leaves_one_open(shape, sequence, said) -> None:
    import keras

    model = keras.Sequential([keras.Input(shape), keras.layers.Dense(16), keras.layers.Dense(8)])
    plan = unidist.plan(model, MESH, batch=32, sequence=16)
    assert plan.sequence == sequence
    assert said in plan.show()


def test_a_length_that_a_model_was_built_for_may_be_open_too() -> None:
    import keras

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(8)

        def build(self, shape) -> None:
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    model = Own()
    model.build((None, None, 4))
    assert unidist.plan(model, MESH, sequence=16).sequence == 16
