"""Runs of a graph in parts: what they find is what whole runs find, and layers are called in proportion to their
number."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from unidist.keras.graphs import Graph, are_kept, has_same_bits
from unidist.keras.patching.compat import StatelessScope, set_keras_mask
from unidist.keras.planning.facts import read

RNG = np.random.default_rng(0)


def stack(depth: int) -> keras.Model:
    inner = [layers.Dense(16, "relu", name=f"d{k}") for k in range(depth)]
    return keras.Sequential([keras.Input((8,)), *inner], name="stack")


def shared() -> keras.Model:
    """One layer at two places: what reaches it is run as a whole, what is behind it in parts."""
    x = keras.Input((8,))
    both = layers.Dense(8, name="both")
    y = both(layers.Dense(8, name="b")(layers.Dense(16, "relu", name="a")(x)))
    z = layers.Dense(8, name="d")(layers.Dense(16, "tanh", name="c")(both(y)))
    return keras.Model(x, layers.Dense(3, name="e")(z))


def shared_between() -> keras.Model:
    """Dropout at two places: between the layers of one pair, and where nothing is cut."""
    x = keras.Input((8,))
    drop = layers.Dropout(0.5, seed=1, name="drop")
    y = layers.Dense(8, name="b")(drop(layers.Dense(16, name="a")(x)))
    z = layers.Dense(8, name="d")(layers.Dense(16, "tanh", name="c")(drop(y)))
    return keras.Model(x, layers.Dense(3, name="e")(z))


def nested() -> keras.Model:
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "relu", name="a"), layers.Dense(8, name="b")], name="i"
    )
    x = keras.Input((8,))
    y = layers.Dense(8, name="d")(layers.Dense(16, "tanh", name="c")(inner(x)))
    outer = keras.Model(x, y + inner.output_shape[-1] * x, name="outer")
    top = keras.Input((8,))
    return keras.Model(top, layers.Dense(3, name="e")(outer(top)))


def several_outputs() -> keras.Model:
    x = keras.Input((8,))
    h = layers.Dense(16, name="a")(x)
    parts = ops.split(h, 2, axis=-1)
    return keras.Model(x, {"left": layers.Dense(3, name="b")(parts[0]), "right": parts[1], "x": x})


def returns_its_input() -> keras.Model:
    """What a layer gives is the very tensor that it takes."""
    x = keras.Input((8,))
    h = layers.Activation("linear")(layers.Identity()(layers.Dense(16, name="a")(x)))
    y = layers.Dense(8, name="b")(layers.Dropout(0.5, name="drop")(h))
    return keras.Model(x, layers.Dense(3, name="c")(layers.Add()([layers.Identity()(y), x])))


def masks() -> keras.Model:
    """An attention takes the masks off what it is given. One that is run again before it still needs them."""
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True, name="table")(words)
    y = layers.Dense(8, name="b")(layers.Dense(16, "relu", name="a")(layers.LayerNormalization()(x)))
    y = layers.MultiHeadAttention(2, 4, name="first")(y, x)
    z = layers.MultiHeadAttention(2, 4, name="second")(x, x)
    return keras.Model(words, layers.Dense(3, name="c")(layers.GlobalAveragePooling1D()(y + z)))


def tensors_among_keywords() -> keras.Model:
    """An operation and a layer that take what changes by keyword."""
    x = keras.Input((5, 8))
    a = layers.Dense(8, name="a")(x)
    high = layers.Dense(8, "softplus", name="high")(x)
    y = ops.where(condition=a > 0, x1=ops.maximum(x1=a, x2=high), x2=ops.minimum(x1=a, x2=high))
    y = layers.Dense(8, name="b")(y)
    z = layers.Attention()(inputs=[y, x])
    return keras.Model(x, layers.Dense(3, name="c")(z + y))


def losses() -> keras.Model:
    """What a change does to a loss on the way leaves the model."""
    x = keras.Input((8,))
    h = layers.ActivityRegularization(l2=0.1)(layers.Dense(16, name="a")(x))
    y = layers.ActivityRegularization(l2=0.2)(layers.Dense(8, name="b")(h))
    z = layers.Dense(8, name="d")(layers.Dense(16, "relu", name="c")(y))
    return keras.Model(x, layers.Dense(3, name="e")(z))


def residual() -> keras.Model:
    x = y = keras.Input((8,))
    for k in range(3):
        z = layers.LayerNormalization()(y)
        y = y + layers.Dense(8, name=f"down{k}")(layers.Dense(16, "gelu", name=f"up{k}")(z))
    return keras.Model(x, layers.Dense(3, name="head")(y))


def meets_whole() -> keras.Model:
    """A gate's outputs spread where one layer takes them, and the row of a later pair takes them too."""
    x = keras.Input((4, 16))
    gate = layers.Dense(4, name="gate")(x)
    y = layers.Dense(16, name="first")(ops.softmax(gate))
    z = layers.Dense(64, name="a")(x + ops.softmax(y)) * ops.mean(gate, axis=-1, keepdims=True)
    return keras.Model(x, layers.Dense(16, name="b")(z))


def no_number() -> keras.Model:
    """A NaN far from the pair is in every run."""
    x = keras.Input((8,))
    y = layers.Dense(8, name="b")(layers.Dense(16, "relu", name="a")(x))
    nan = ops.log(ops.negative(ops.exp(x)))
    return keras.Model(x, [layers.Dense(3, name="c")(y), layers.Dense(3, name="d")(nan)])


class Remembers(layers.Layer):  # type: ignore[misc]
    """Two of them know of each other's calls, past the graph."""

    last: list[object] = []  # noqa: RUF012

    def __init__(self, tells: bool, **options: str) -> None:
        super().__init__(**options)
        self.tells = tells

    def call(self, x):  # type: ignore[no-untyped-def]
        if self.tells:
            self.last[:] = [ops.sum(x, axis=-1, keepdims=True)]
            return x
        return x * self.last[0]

    def compute_output_spec(self, x):  # type: ignore[no-untyped-def]
        return keras.KerasTensor(x.shape, x.dtype)


def past_the_graph() -> keras.Model:
    x = keras.Input((8,))
    y = layers.Dense(8, name="b")(Remembers(True)(layers.Dense(16, name="a")(x)))
    return keras.Model(x, layers.Dense(3, name="c")(y + Remembers(False)(x)))


MODELS = {
    "stack": lambda: stack(5),
    "shared": shared,
    "shared between": shared_between,
    "nested": nested,
    "several outputs": several_outputs,
    "returns its input": returns_its_input,
    "masks": masks,
    "tensors among keywords": tensors_among_keywords,
    "losses": losses,
    "residual": residual,
    "meets whole": meets_whole,
    "no number": no_number,
    "past the graph": past_the_graph,
}
WHOLE = ("no number", "past the graph")


def found(build: Callable[[], keras.Model]) -> object:
    """All that the planner knows of a model. Inputs are numbered as they come."""
    facts, seen = read(build(), 4), dict[int, int]()

    def numbered(calls):  # type: ignore[no-untyped-def]
        return dataclasses.replace(calls, inputs=tuple(seen.setdefault(k, len(seen)) for k in calls.inputs))

    facts_of_layers = [
        dataclasses.replace(layer, calls=numbered(layer.calls), scores=numbered(layer.scores)) for layer in facts.layers
    ]
    return facts.reaches, facts.variables, facts_of_layers


def planned(build: Callable[[], keras.Model]) -> object:
    """The plan, for which not every change is followed to its end."""
    plan = unidist.plan(build(), unidist.Mesh({"model": 4}))
    return plan.show(400), plan.pairs, plan.layout_map.to_json()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many runs were made in parts."""
    counted, replaying = Counter[str](), Graph.replaying

    def counting(self, *args):  # type: ignore[no-untyped-def]
        counted["runs"] += 1
        return replaying(self, *args)

    monkeypatch.setattr(Graph, "replaying", counting)
    return counted


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning")
@pytest.mark.parametrize("look", [found, planned])
@pytest.mark.parametrize("name", MODELS)
def test_runs_in_parts_find_what_whole_runs_find(name, look, replays, monkeypatch) -> None:
    keras.utils.clear_session()  # names are counted
    in_parts = look(MODELS[name])
    assert bool(replays["runs"]) == (name not in WHOLE)
    monkeypatch.setattr(Graph, "of", lambda model: None)
    keras.utils.clear_session()
    assert look(MODELS[name]) == in_parts


def test_a_change_that_a_plan_asks_for_is_followed_to_its_end() -> None:
    facts = read(meets_whole(), 4, follow=lambda facts: [])
    (gate,) = (k for k, layer in enumerate(facts.layers) if layer.path == "gate")
    (short,) = (reach for reach in facts.reaches if reach.source == gate)
    (whole,) = (reach for reach in read(meets_whole(), 4).reaches if reach.source == gate)
    assert (short.is_whole, whole.is_whole) == (False, True)
    assert set(short.spread) < set(whole.spread)
    rows = {row.path: row.reason for row in unidist.plan(meets_whole(), unidist.Mesh({"model": 4})).rows}
    assert rows["b/kernel"] == "row: second of a pair with a"
    assert rows["gate/kernel"].startswith("column: its outputs are gathered, (16, 4) has no 4 equal parts that meet")


# how often layers are called ------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often layers of a class are called."""
    counted, call = Counter[str](), layers.Layer.__call__

    def counting(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        counted[type(self).__name__] += 1
        return call(self, *args, **kwargs)

    monkeypatch.setattr(layers.Layer, "__call__", counting)
    return counted


def residuals(count: int) -> keras.Model:
    x = y = keras.Input((8,))
    for _ in range(count):
        y = y + layers.Dense(8)(layers.Dense(16, "relu")(layers.LayerNormalization()(y)))
    return keras.Model(x, y)


def backbone(count: int) -> keras.Model:
    import keras_hub

    return keras_hub.models.GPT2Backbone(
        vocabulary_size=32, num_layers=count, num_heads=4, hidden_dim=16, intermediate_dim=32, max_sequence_length=8
    )


@pytest.mark.parametrize(("build", "few", "many"), [(stack, 8, 64), (residuals, 4, 32), (backbone, 2, 8)])
def test_planning_calls_each_layer_as_often_however_many_there_are(build, few, many, calls) -> None:
    def each(count: int) -> float:
        model = build(count)
        calls.clear()
        assert unidist.plan(model, unidist.Mesh({"model": 4})).pairs
        return sum(calls.values()) / count

    assert each(many) <= 1.1 * each(few)


def test_attention_on_a_fixed_length_is_computed_a_few_times(calls) -> None:
    """Its scores are the square of the length: each run of it counts."""

    def transformer(count: int) -> keras.Model:
        words = keras.Input((1024,), dtype="int32")
        y = layers.Embedding(16, 8)(words)
        for _ in range(count):
            y = y + layers.MultiHeadAttention(4, 2)(y, y)
            y = y + layers.Dense(8)(layers.Dense(16, "gelu")(layers.LayerNormalization()(y)))
        return keras.Model(words, layers.Dense(16)(y))

    def each(count: int) -> float:
        model = transformer(count)
        calls.clear()
        assert len(unidist.plan(model, unidist.Mesh({"model": 4})).pairs) == 2 * count
        return calls["MultiHeadAttention"] / count

    # The last one has no values, so that nothing is computed.
    assert each(6) <= 14


# what a run in parts rests on -----------------------------------------------------------------------------------------


def recorded(graph: Graph, model: keras.Model, x: torch.Tensor):  # type: ignore[no-untyped-def]
    with StatelessScope(collect_losses=True), graph.recording() as record:
        model(x)
    return record


def test_the_graph_has_its_own_run_again() -> None:
    model = stack(2)
    graph = Graph.of(model)
    assert graph is not None
    with pytest.raises(KeyError), StatelessScope(), graph.recording():
        raise KeyError
    assert "_run_through_graph" not in vars(model._functional)
    record = recorded(graph, model, torch.ones((2, 8)))
    assert graph.is_whole(record)
    assert [graph.place_of(layer) for layer in model.layers] == [0, 1]
    assert graph.place_of(layers.Dense(2)) is None


def test_a_place_before_a_shared_layer_is_none() -> None:
    model = shared()
    graph = Graph.of(model)
    assert graph is not None
    places = {layer.name: graph.place_of(layer) for layer in model.layers[1:]}
    assert places["a"] is places["b"] is places["both"] is None
    assert places["c"] + 2 == places["d"] + 1 == places["e"]


def test_a_run_that_writes_is_not_kept() -> None:
    x = keras.Input((8,))
    model = keras.Model(x, layers.Dropout(0.5)(layers.Dense(4)(x), training=True))
    graph = Graph.of(model)
    assert graph is not None
    assert not graph.is_whole(recorded(graph, model, torch.ones((2, 8))))


class OwnCall(keras.Model):  # type: ignore[misc]
    def call(self, x):  # type: ignore[no-untyped-def]
        return super().call(x)


class OwnEntrance(layers.Dense):  # type: ignore[misc]
    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return super().__call__(*args, **kwargs)


class Own(layers.Layer):  # type: ignore[misc]
    def call(self, x):  # type: ignore[no-untyped-def]
        return 2 * x

    def compute_output_shape(self, shape):  # type: ignore[no-untyped-def]
        return shape


def hooked() -> keras.Model:
    model = stack(2)
    model.layers[0].register_forward_hook(lambda layer, args, out: out * 2)
    return model


def called_otherwise() -> keras.Model:
    model = stack(2)
    model.layers[0].call = lambda x: x[:, :1] * torch.ones((1, 16))
    return model


def of_layer(*several: layers.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), *several])
    assert model._functional is not None
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: of_layer(layers.Lambda(lambda x: x)),
        lambda: of_layer(Remembers(True)),
        lambda: of_layer(OwnEntrance(4)),
        lambda: of_layer(layers.Dense(4, activation=lambda x: x)),
        lambda: of_layer(of_layer(Remembers(True))),
        lambda: of_layer(layers.Reshape((2, 4)), layers.TimeDistributed(Own())),
        lambda: keras.Model(x := keras.Input((8,)), ops.map(lambda row: row + 1, x)),
        lambda: OwnCall(x := keras.Input((8,)), layers.Dense(4)(x)),
        hooked,
        called_otherwise,
    ],
)
def test_code_of_the_users_is_run_as_a_whole(build) -> None:
    assert Graph.of(build()) is None


def test_layers_of_keras_are_run_in_parts() -> None:
    assert Graph.of(of_layer(layers.Reshape((2, 4)), layers.TimeDistributed(layers.Dense(4)))) is not None
    x = keras.Input((8,))
    assert Graph.of(keras.Model(x, ops.softmax(layers.Dense(4)(x)))) is not None


def test_bits_are_compared() -> None:
    zero, nan = torch.tensor(0.0), torch.tensor(float("nan"))
    assert has_same_bits(zero, torch.tensor(0.0))
    assert has_same_bits(nan, torch.tensor(float("nan")))
    assert not has_same_bits(zero, -zero)
    assert not has_same_bits(zero, torch.tensor(0))
    assert not has_same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert not has_same_bits(zero, None)
    assert has_same_bits(torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_a_change_of_a_mask_alone_goes_on() -> None:
    """The values behind the changed layer are those that they were, but not their mask."""
    x = keras.Input((3, 8))
    marked = layers.Masking()
    y = layers.GlobalAveragePooling1D()(ops.zeros_like(marked(x)) + layers.Activation("relu")(marked(x)))
    model = keras.Model(x, y)
    graph = Graph.of(model)
    assert graph is not None
    given = torch.ones((2, 3, 8))
    record = recorded(graph, model, given)
    pooling = next(k for k, node in enumerate(graph._nodes) if node.operation.name.startswith("global"))
    kept = record.calls[pooling - 1]
    other = kept.outputs[0].clone()
    set_keras_mask(other, torch.zeros((2, 3), dtype=torch.bool))
    assert are_kept([kept.outputs[0]], kept)
    assert not are_kept([other], kept)
