"""Models of every shape with nothing but ModelParallel(mesh): equal to one device, sharded, and no trap is taken."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.support.sampling import unless_all
from unidist.keras.planning.auto_layouts import waits
from unidist.keras.records import model_record

RNG = np.random.default_rng(3)


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), *(layers.Dense(16, "relu") for _ in range(3)), layers.Dense(4)])


def convolutions() -> keras.Model:
    x = keras.Input((8, 8, 3))
    y = layers.Conv2D(8, 3, activation="relu")(x)
    y = layers.BatchNormalization()(y)
    y = layers.Conv2D(16, 3, padding="same")(y)
    return keras.Model(x, layers.Dense(4)(layers.Flatten()(y)))


def gates(kind: type[layers.Layer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6, 8)), kind(12, return_sequences=True), kind(8), layers.Dense(4)])

    return build


def attention() -> keras.Model:
    x = keras.Input((6, 16))
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 4, dropout=0.0)(x, x))
    z = layers.EinsumDense("abc,cd->abd", (6, 32), bias_axes="d", activation="gelu")(y)
    y = y + layers.EinsumDense("abd,dc->abc", (6, 16), bias_axes="c")(z)
    return keras.Model(x, layers.Dense(4)(layers.GlobalAveragePooling1D()(y)))


def shared_and_nested() -> keras.Model:
    """One block called twice, as a model inside of a model, and a layer whose output is used twice."""
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(8)], name="inner")
    x = keras.Input((8,))
    y = inner(inner(x))
    both = layers.Dense(16, name="both")(y)
    return keras.Model(x, layers.Dense(4)(layers.Concatenate()([both, layers.Dense(16)(both)])))


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = layers.Dense(32, "silu"), layers.Dense(32), layers.Dense(8)
        self.head = layers.Dense(4)

    def build(self, shape: tuple[int, ...]) -> None:
        self.up.build(shape)
        self.gate.build(shape)
        self.down.build((*shape[:-1], 32))
        self.head.build((*shape[:-1], 8))

    def call(self, x):  # type: ignore[no-untyped-def]
        return self.head(x + self.down(self.up(x) * self.gate(x)))


def subclassed() -> keras.Model:
    model = Subclassed()
    model.build((None, 8))
    return model


class Reads(layers.Layer):  # type: ignore[misc]
    """Reads the kernel of a layer that is not its own."""

    def __init__(self, other: layers.Layer) -> None:
        super().__init__()
        self.read = lambda: other.kernel

    def call(self, x):  # type: ignore[no-untyped-def]
        return x + ops.mean(self.read())


def reads_another() -> keras.Model:
    x = keras.Input((8,))
    second = layers.Dense(8, name="second")
    y = second(layers.Dense(16, "relu", name="first")(x))
    return keras.Model(x, layers.Dense(4)(Reads(second)(y)))


def trap(between: Callable[[object], object]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        x = keras.Input((8,))
        y = between(layers.Dense(16, name="first")(x))
        return keras.Model(x, layers.Dense(4, name="second")(y))

    return build


def fused(y):  # type: ignore[no-untyped-def]
    left, right = ops.split(y, 2, axis=-1)
    return left * right


MODELS: dict[str, tuple[Callable[[], keras.Model], int | None]] = {
    "mlp": (mlp, 2),
    "convolutions": (convolutions, None),
    "lstm": (gates(layers.LSTM), None),
    "gru": (gates(layers.GRU), None),
    "attention": (attention, 2),
    "shared and nested": (shared_and_nested, 1),
    "subclassed": (subclassed, 1),
    "reads another": (reads_another, 0),
    "softmax": (trap(layers.Softmax()), 0),
    "fused split": (trap(fused), 0),
    "cumulative sum": (trap(lambda y: ops.cumsum(y, axis=-1)), 0),
    "roll": (trap(lambda y: ops.roll(y, 4, axis=-1)), 0),
    "scaled by all": (trap(lambda y: y * ops.mean(y, axis=-1, keepdims=True)), 0),
}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_kernels_are_planned_and_predict_alike(kind: str) -> None:
    """Of int4, variables say to which group each row belongs."""

    def predicted(strategy: unidist.ModelParallel | None):  # type: ignore[no-untyped-def]
        keras.utils.set_random_seed(5)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = mlp()
            for layer in model.layers:
                layer.quantize(kind)
        found = model.predict(np.random.default_rng(6).normal(size=(6, 8)), verbose=0)
        return model, found

    (model, found), (_, wanted) = (
        predicted(given) for given in (unidist.ModelParallel(unidist.Mesh({"model": 4})), None)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert model_record.of(model).engine is not None


def train(build: Callable[[], keras.Model], strategy: unidist.ModelParallel | None, in_scope: bool = True):  # type: ignore[no-untyped-def]
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy and in_scope else contextlib.nullcontext():
        model = build()
        model.compile(keras.optimizers.AdamW(1e-2, epsilon=1e-3), "mse")
    if strategy and not in_scope:
        unidist.parallelize(model, strategy)
    rng = np.random.default_rng(6)
    inputs = getattr(model, "inputs", None)
    shape = (10, *(inputs[0].shape[1:] if inputs else (8,)))
    x, y = rng.normal(size=shape).astype("float32"), rng.normal(size=(10, 4)).astype("float32")
    losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
    return model, losses, [np.asarray(v) for v in model.weights]


SIZES: dict[str, dict[str, int]] = {"4": {"model": 4}, "2x2": {"data": 2, "model": 2}}
# Those with pairs on both, the others on one each.
SOME = [(name, mesh) for k, name in enumerate(MODELS) for mesh in SIZES if MODELS[name][1] or mesh == [*SIZES][k % 2]]


@pytest.mark.parametrize(("name", "mesh"), unless_all(SOME, list(itertools.product(MODELS, SIZES))))
def test_a_model_without_a_rule_trains_as_on_one_device(name: str, mesh: str) -> None:
    sizes = SIZES[mesh]
    build, pairs = MODELS[name]
    _, losses, weights = train(build, None)
    with unidist.ledger() as traffic:
        model, found, held = train(build, unidist.ModelParallel(unidist.Mesh(sizes)), in_scope="data" in sizes)
    np.testing.assert_allclose(found, losses, atol=1e-5, rtol=1e-5)
    for variable, a, b in zip(model.weights, held, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=variable.path)
    assert unidist.describe(model).sharded
    assert any("model" in e.axes for e in traffic.events)
    plan = unidist.plan(model, unidist.Mesh(sizes))
    if pairs is not None:
        assert len(plan.pairs) == pairs
    _planned_is_told(plan, model)


# How the plan begins to say why it cuts a variable, and how describe begins to say what its layer does.
TOLD = {
    "column: first of a pair": "column: ",
    "row: second of a pair": "row: its inputs come cut",
    "column: its outputs are gathered": "column: ",
    "row: its inputs are cut": "row: ",
    "convolution: ": "gathered for each call: ",
    "gathered: for each call": "gathered for each call: ",
}


def _planned_is_told(plan: unidist.Plan, model: keras.Model) -> None:
    """The rows of the plan's pairs take features that come cut, and both say of each layer why it is cut so."""
    why = unidist.describe(model).why
    taking = {rule.name for rule in model_record.of(model).engine.rules if rule.comes_cut}
    assert taking >= {row for *_, row in plan.pairs}
    for path, reason in {row.path: row.reason for row in plan.rows if row.is_sharded}.items():
        layer, _, name = path.rpartition("/")
        assert layer in why
        if name == "kernel":
            assert why[layer].startswith(next(told for begun, told in TOLD.items() if reason.startswith(begun))), layer


def drawn_at_every_call() -> keras.Model:
    """Keras's recurrent layers draw masks in every call, and torch's generator serves them."""
    x = keras.Input((6, 8))
    y = layers.Dense(8)(layers.Dense(16, "relu")(x))
    return keras.Model(x, layers.Dense(4)(layers.LSTM(8, dropout=0.5)(y)))


def test_finding_layouts_draws_no_numbers_of_the_program() -> None:
    _, losses, weights = train(drawn_at_every_call, None)
    strategy = unidist.ModelParallel(unidist.Mesh({"data": 1, "model": 4}), exact_random=True)
    model, found, held = train(drawn_at_every_call, strategy)
    assert any(rule.comes_cut for rule in model_record.of(model).engine.rules)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(held, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


class Parted(keras.Model):  # type: ignore[misc]
    """Two models and a layer of its own, and no call: nothing says what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = keras.Sequential([keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(4)], name="maker")
        self.judge = keras.Sequential([keras.Input((4,)), layers.Dense(16, "tanh"), layers.Dense(8)], name="judge")
        self.head = layers.Dense(4, name="head")
        self.head.build((None, 8))
        self.error = keras.losses.MeanSquaredError()
        self.built = True

    def compile(self, optimizer, loss):  # type: ignore[no-untyped-def]
        super().compile(optimizer)

    def train_step(self, data):  # type: ignore[no-untyped-def]
        x, y = data
        self.zero_grad()
        loss = self.error(y, self.head(self.judge(self.maker(x, training=True), training=True)))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


@pytest.mark.parametrize("sizes", [{"model": 4}, {"data": 2, "model": 2}], ids=["4", "2x2"])
def test_a_model_that_says_nothing_is_planned_by_its_parts(sizes: dict[str, int]) -> None:
    _, losses, weights = train(Parted, None)
    strategy = unidist.ModelParallel(unidist.Mesh(sizes))
    model, found, held = train(Parted, strategy)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(held, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    cut = {row.path.split("/")[0] for row in unidist.describe(model).sharded}
    assert cut >= {"maker", "judge"}
    assert "head" not in cut
    assert not waits(model, strategy)


class Rising(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Says nothing of itself."""

    def __call__(self, step):  # type: ignore[no-untyped-def]
        return 0.01 * (ops.cast(step, "float32") + 1)


class Returning(keras.optimizers.SGD):  # type: ignore[misc]
    """Its slots begin with the variables' values."""

    def build(self, variables):  # type: ignore[no-untyped-def]
        super().build(variables)
        self.first = [self.add_variable_from_reference(v, "first") for v in variables]
        for slot, variable in zip(self.first, variables, strict=True):
            slot.assign(variable)


def test_slots_are_counted_of_any_optimizer() -> None:
    def planned(optimizer: keras.optimizers.Optimizer) -> int:
        model = mlp()
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        before = [v.path for v in optimizer.variables]
        plan = unidist.plan(model, unidist.Mesh({"model": 4}))
        assert [v.path for v in optimizer.variables] == before
        return plan.slot_bytes_per_device

    once = planned(keras.optimizers.SGD(0.1, momentum=0.9))
    assert planned(Returning(Rising())) == once
    assert planned(keras.optimizers.Nadam()) == 2 * once
    assert planned(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(Rising(), momentum=0.9))) == once
