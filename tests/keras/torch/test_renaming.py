"""A model that a program makes again, so that Keras counts its names on, takes a checkpoint of the one before."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from tests.support.sampling import unless_all
from unidist.keras.checkpoint import renaming
from unidist.keras.patching import compat

X = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
# Keras's load_model from 3.16 on.
KEEPS_NAMES = compat.nearest() != "3.15"
Y = np.random.default_rng(2).normal(size=(32, 4)).astype("float32")


class Twice(keras.layers.Layer):
    """A layer with layers of its own, whose class has a number."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.first, self.second = keras.layers.Dense(6, "relu"), keras.layers.Dense(6, "relu")

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def stack() -> list[Any]:
    """Ten and more of a class: "dense_10" comes behind "dense_9"."""
    return [*(keras.layers.Dense(6, "relu") for _ in range(11)), keras.layers.Dense(4)]


def nested() -> list[Any]:
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.Dense(6)])
    return [inner, keras.layers.BatchNormalization(), Twice(), keras.layers.Dense(4)]


def random() -> list[Any]:
    return [keras.layers.Dense(6), keras.layers.Dropout(0.3), keras.layers.Dropout(0.2), keras.layers.Dense(4)]


def recurrent() -> list[Any]:
    return [
        keras.layers.Reshape((3, 2)),
        keras.layers.LSTM(6, return_sequences=True),
        keras.layers.GRU(6),
        keras.layers.Dense(4),
    ]


def named() -> list[Any]:
    return [keras.layers.Dense(6, name="up_1"), keras.layers.Dense(6), keras.layers.Dense(4, name="down")]


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def make(layers: Callable[[], list[Any]], optimizer: Callable[[], Any]) -> Any:
    with unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}), zero=1).scope():
        model = keras.Sequential([keras.Input((6,)), *layers()])
        model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def train(model: Any) -> list[float]:
    found: list[float] = model.fit(X, Y, batch_size=8, epochs=1, verbose=0).history["loss"]
    return found


def values(model: Any) -> list[Any]:
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(
    ("layers", "optimizer"),
    [(stack, adam), (nested, scaled), (random, adam), (recurrent, scaled), (named, adam)],
    ids=lambda one: one.__name__,
)
def test_it_goes_on_as_the_one_before(
    layers: Callable[[], list[Any]], optimizer: Callable[[], Any], tmp_path: Path
) -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = make(layers, optimizer)
    train(model)
    unidist.save(model, tmp_path)
    losses = train(model)
    again = make(layers, optimizer)
    train(again)  # what a first fit draws is drawn
    assert [v.path for v in again.weights] != [v.path for v in model.weights]
    told = unidist.restore(again, tmp_path)
    assert (told.skipped, told.converted) == ((), ())
    assert train(again) == losses
    for value, found in zip(values(model), values(again), strict=True):
        np.testing.assert_array_equal(value, found)


def test_optimizers_of_two_models_keep_their_own_slots() -> None:
    keras.utils.clear_session()

    class Pair(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = keras.layers.Dense(2), keras.layers.Dense(2)
            self.for_one, self.for_two = keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.2)
            self.one.build((None, 2))
            self.two.build((None, 2))
            self.for_one.build(self.one.trainable_variables)
            self.for_two.build(self.two.trainable_variables)

    def kinds(model: Any) -> dict[str, str]:
        slots = {v.path: "optimizer" for one in (model.for_one, model.for_two) for v in one.variables}
        return {**{v.path: "model" for v in (*model.one.weights, *model.two.weights)}, **slots}

    before, after = Pair(), Pair()
    found = renaming.in_checkpoint(after, kinds(after), kinds(before))
    assert set(found) == set(kinds(after))
    assert set(found.values()) == set(kinds(before))
    assert found["adam_2/learning_rate"] == "adam/learning_rate"
    assert found["adam_3/dense_3_kernel_velocity"] == "adam_1/dense_1_kernel_velocity"


def test_slots_are_of_the_variable_with_the_longest_name() -> None:
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD())
    ours = {"x/dense": "model", "x/dense/k": "model", "sgd/x_dense_m": "optimizer", "sgd/x_dense_k_m": "optimizer"}
    theirs = {
        "x/dense": "model",
        "x/dense_1/k": "model",
        "sgd/x_dense_m": "optimizer",
        "sgd/x_dense_1_k_m": "optimizer",
    }
    assert renaming.in_checkpoint(model, ours, theirs) == dict(zip(ours, theirs, strict=True))


def test_names_that_a_user_gave_are_not_counted_on(tmp_path: Path) -> None:
    keras.utils.clear_session()

    def blocks(first: int) -> Callable[[], list[Any]]:
        return lambda: [keras.layers.Dense(6, name=f"block_{k}") for k in (first, first + 1)] + [keras.layers.Dense(4)]

    unidist.save(make(blocks(0), adam), tmp_path)
    with pytest.raises(unidist.CheckpointError, match=re.escape("block_2/kernel: is in the model alone")):
        unidist.restore(make(blocks(1), adam), tmp_path)


@pytest.mark.parametrize("fewer", [True, False])
def test_a_model_of_more_or_fewer_layers_is_another(fewer: bool, tmp_path: Path) -> None:
    keras.utils.clear_session()
    sizes = (3, 2) if fewer else (2, 3)

    def of(count: int) -> Callable[[], list[Any]]:
        return lambda: [keras.layers.Dense(4) for _ in range(count)]

    unidist.save(make(of(sizes[0]), adam), tmp_path)
    other = make(of(sizes[1]), adam)
    before = [np.asarray(v) for v in other.variables]
    with pytest.raises(unidist.CheckpointError, match="does not fit model 'sequential_1'"):
        unidist.restore(other, tmp_path)
    for value, v in zip(before, other.variables, strict=True):
        np.testing.assert_array_equal(value, np.asarray(v))


@keras.saving.register_keras_serializable("tests")
class Own(keras.Model):  # type: ignore[misc]
    """Layers of its own, which count on when Keras makes it again."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.first, self.last = keras.layers.Dense(6, "relu"), keras.layers.Dense(4)
        self.norm = keras.layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.norm.build(shape)
        self.last.build(shape)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.last(self.norm(self.first(x), training=training))


def of_own() -> Any:
    model = Own()
    model.build((None, 6))
    return model


def of_one() -> Any:
    """A layer and a model of several layers that are each called twice, around another model."""
    x = keras.Input((6,))
    shared = keras.layers.Dense(6, "relu")
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.Dropout(0.2)])
    return keras.Model(x, keras.layers.Dense(4)(keras.layers.Add()([shared(shared(x)), inner(inner(x))])))


def of_rows() -> Any:
    layers = [keras.layers.Reshape((3, 2)), keras.layers.Bidirectional(keras.layers.LSTM(3)), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((6,)), *layers])


def lasting(model: Any) -> list[Any]:
    """Values of all but metrics, which are made when they are asked for."""
    seeds = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    return [np.asarray(v) for v in (*model.weights, *seeds, *model.optimizer.variables)]


@pytest.mark.parametrize(
    ("kind", "counts_on", "is_distributed"),
    [
        *((of_own, True, True), (of_one, True, True), (of_rows, True, True)),
        *((of_one, False, True), (of_own, True, False), *unless_all([], [(of_rows, False, False)])),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_models_that_keras_has_loaded_take_it_and_give_it(
    kind: Callable[[], Any], counts_on: bool, is_distributed: bool, tmp_path: Path
) -> None:
    """Keras builds their layers by themselves: their paths begin elsewhere."""

    def scope() -> Any:
        mesh = unidist.Mesh({"data": 2, "model": 2})
        return unidist.ModelParallel(mesh, zero=1).scope() if is_distributed else contextlib.nullcontext()

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    with scope():
        model = kind()
        model.compile(adam(), "mse", metrics=["mae"])
    train(model)
    model.save(tmp_path / "model.keras")
    train(model)
    unidist.save(model, tmp_path / "made")
    wanted = lasting(model)
    losses = train(model)
    if not counts_on:
        keras.utils.clear_session()
    with scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    names = [[v.path for v in (*one.weights, *one.optimizer.variables)] for one in (model, loaded)]
    assert names[0] != names[1] or not counts_on or KEEPS_NAMES
    # A first fit draws random numbers while it makes what it needs.
    for is_first in (True, False):
        told = unidist.restore(loaded, tmp_path / "made")
        assert (told.skipped, told.converted) == ((), ())
        for value, found in zip(wanted, lasting(loaded), strict=True):
            np.testing.assert_array_equal(value, found)
        unidist.save(loaded, tmp_path / "loaded")
        assert train(loaded) == pytest.approx(losses, rel=1e-5) or is_first
    unidist.restore(model, tmp_path / "loaded")
    for value, found in zip(wanted, lasting(model), strict=True):
        np.testing.assert_array_equal(value, found)


@pytest.mark.skipif(KEEPS_NAMES, reason="a loaded model has the names of the one that was saved")
def test_names_that_a_user_gave_differ_in_a_loaded_model_too(tmp_path: Path) -> None:
    keras.utils.clear_session()

    def build(*names: str) -> Any:
        layers = [keras.layers.Dense(6, name=name) for name in names]
        return keras.Sequential([keras.Input((6,)), *layers])

    unidist.save(build("one", "two"), tmp_path / "run", step=1)
    build("two", "one").save(tmp_path / "model.keras")
    with pytest.raises(unidist.CheckpointError, match=re.escape("- two/kernel: is in the model alone")):
        unidist.restore(keras.saving.load_model(tmp_path / "model.keras"), tmp_path / "run")


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.RMSprop(),
        lambda: keras.optimizers.Adam(0.1, amsgrad=True),
        scaled,
    ],
)
def test_another_optimizer_is_an_error_that_names_what_is_missing(optimizer: Any, tmp_path: Path) -> None:
    keras.utils.clear_session()
    model = make(named, adam)
    unidist.save(model, tmp_path)
    other = make(named, optimizer)
    before = [np.asarray(v) for v in other.weights]
    with pytest.raises(unidist.CheckpointError, match="The weights fit, and the optimizer is another one") as raised:
        unidist.restore(other, tmp_path)
    slots = {v.path for v in other.optimizer.variables}
    alone = {
        line.removeprefix("- ").partition(":")[0] for line in str(raised.value).splitlines() if "in the model" in line
    }
    assert alone
    assert alone <= slots
    for value, v in zip(before, other.weights, strict=True):
        np.testing.assert_array_equal(value, np.asarray(v))
    assert unidist.restore(other, tmp_path, strict=False).skipped
    for value, v in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(v))


@keras.saving.register_keras_serializable("tests")
class Drawing(keras.layers.Layer):  # type: ignore[misc]
    """A layer that makes its generator of random numbers when it is built."""

    def build(self, shape: Any) -> None:
        self.generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        return x


def test_seeds_that_are_made_with_a_layer_come_along(tmp_path: Path) -> None:
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((6,)), Drawing(), Drawing(), keras.layers.Dense(4)])
    for number, layer in enumerate(model.layers[:2]):
        layer.generator.state.assign(np.array([number + 5, number]))
    model.save(tmp_path / "model.keras")
    unidist.save(model, tmp_path / "run", step=1)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    states = [[layer.generator.state for layer in one.layers[:2]] for one in (model, loaded)]
    assert all(a.path != b.path for a, b in zip(*states, strict=True))
    for state in states[1]:
        state.assign(np.zeros(2))
    unidist.restore(loaded, tmp_path / "run")
    for number, state in enumerate(states[1]):
        np.testing.assert_array_equal(np.asarray(state), [number + 5, number])
