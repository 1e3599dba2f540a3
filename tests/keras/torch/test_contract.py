"""Losses and metrics, where a model is made and kept, what is told of it and drawn: in the simulator, on torch.

(What all backends promise: tests/promises.)
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref

import keras
import numpy as np
import pytest
from keras import layers, ops

import unidist
from tests.keras.torch.models import PAIR, assert_equal, features, mlp, model_parallel, train, two_by_two
from unidist.keras.patching.compat import BaseOptimizer

STRATEGIES = {
    "dp": lambda: unidist.DataParallel(),
    "2x2": lambda: model_parallel(mesh=two_by_two()),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


LOSSES = {
    "scalar function": {"loss": lambda t, p: ops.mean(ops.square(t - p))},
    "sum": {"loss": keras.losses.MeanSquaredError(reduction="sum")},
    "mean with sample weight": {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
    "metrics": {"loss": "mae", "metrics": ["mse", keras.metrics.R2Score()], "weighted_metrics": ["mae"]},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_metrics(name, strategy):
    x, y = features()
    weights = np.linspace(0.5, 2, 10).astype("float32")
    given = {"sample_weight": weights} if name != "scalar function" else {}
    wanted = train(mlp, x, y, compiled=dict(LOSSES[name]), **given)
    if name == "metrics":
        LOSSES[name]["metrics"] = ["mse", keras.metrics.R2Score()]
    assert_equal(train(mlp, x, y, strategy, compiled=dict(LOSSES[name]), **given), wanted)


def test_masks_and_weights_of_places(strategy):
    """Keras multiplies a mask into the weights in place: ranks that have the same rows must not share them."""
    rng = np.random.default_rng(5)
    words, wanted = rng.integers(0, 3, (10, 5)), rng.normal(size=(10, 5, 3)).astype("float32")
    weights = rng.uniform(0.5, 2, (10, 5)).astype("float32")

    def build():
        stack = [layers.Dense(16, "relu", name="a"), layers.Dense(8, name="b"), layers.Dense(3)]
        return keras.Sequential([layers.Input((5,), dtype="int32"), layers.Embedding(3, 8, mask_zero=True), *stack])

    found, alone = (train(build, words, wanted, given, sample_weight=weights.copy()) for given in (strategy, None))
    assert_equal(found, alone)


def test_fit_outside_the_scope_is_distributed_all_the_same():
    x, y = features()
    wanted = train(mlp, x, y)
    keras.utils.set_random_seed(11)
    with model_parallel(mesh=two_by_two()).scope():
        model = mlp()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    with unidist.ledger() as traffic:
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert traffic.count("all_reduce", purpose="gradient") == 6
    for a, b in zip(model.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=1e-5)


def test_a_model_without_variables_remembers_its_scope():
    x, y = features()
    with unidist.DataParallel().scope():
        model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", loss="mse")
    with unidist.ledger() as traffic:
        model.fit(x, y, batch_size=4, verbose=0)
    assert traffic.count("all_reduce", purpose="gradient") == 3


def test_a_trained_model_is_let_go():
    model = train(mlp, *features(), unidist.DataParallel(), epochs=1).model
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


def test_parallelize_takes_a_trained_model_with_its_slots():
    x, y = features()
    wanted = train(mlp, x, y)
    model = train(mlp, x, y).model
    unidist.parallelize(model, model_parallel())
    slots = [row for row in unidist.describe(model).rows if "momentum" in row.path]
    assert sorted(row.local_shape for row in slots if row.is_sharded) == [(4,), (4, 8), (12, 4)]
    for m in (model, wanted.model):
        keras.utils.set_random_seed(5)
        m.fit(x, y, batch_size=4, verbose=0)
    for path, value in unidist.gather_weights(model).items():
        assert path
        assert value.dtype == "float32"
    for a, b in zip(model.weights, wanted.model.weights, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


class Named(layers.Layer):
    """A square kernel of each of some names."""

    def __init__(self, *names, **options):
        super().__init__(**options)
        self.names = names

    def build(self, shape):
        self.kernels = [self.add_weight(shape=(shape[-1],) * 2, name=name) for name in self.names]

    def call(self, x):
        for kernel in self.kernels:
            x = x @ kernel
        return x


def test_slots_of_an_optimizer_built_before_the_hooks_lie_as_their_variables(monkeypatch):
    hook = keras.optimizers.Optimizer.add_variable_from_reference
    monkeypatch.setattr(BaseOptimizer, "add_variable_from_reference", hook.__wrapped__)
    parts = [Named("w", "w_b", name="n"), Named("b_c", name="a"), Named("c", name="a_b")]
    model = keras.Sequential([layers.Input((8,)), *parts])
    model.compile(keras.optimizers.Adam(use_ema=True), loss="mse")
    model.optimizer.build(model.trainable_variables)
    grid = unidist.Mesh({"model": 4})
    rules = unidist.LayoutMap(grid, {".*/n/w_b": (None, "model"), ".*/a_b/c": ("model",)})
    unidist.parallelize(model, unidist.ModelParallel(grid, rules))
    optimizer = model.optimizer
    for k, variable in enumerate(model.trainable_variables):
        lies = variable._storage.layout
        assert bool(lies.dims) == (k in (1, 3))
        tables = optimizer._momentums, optimizer._velocities, optimizer._model_variables_moving_average
        assert [table[k]._storage.layout for table in tables] == [lies] * 3


def test_a_layout_given_by_hand_stays_where_layouts_are_found():
    with unidist.ModelParallel(unidist.Mesh({"model": 4}), "auto").scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(16, name="a"), layers.Dense(8, name="b"), Given()])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
    assert model.layers[0].kernel._storage.is_sharded
    for variable in (model.layers[-1].kernel, model.optimizer.momentums[-1]):
        assert variable._storage.layout == unidist.Layout(None, "model")


class Given(layers.Layer):
    """A kernel with a layout of its own."""

    def build(self, shape):
        lies = keras.distribution.TensorLayout((None, "model"))
        self.kernel = keras.Variable("glorot_uniform", (shape[-1],) * 2, layout=lies, name="kernel")

    def call(self, x):
        return x @ self.kernel


def test_dropout_draws_alike_on_replicas_and_apart_on_shards():
    def build():
        return keras.Sequential([layers.Input((12,)), layers.Dropout(0.5, seed=1), layers.Dense(16, name="a")])

    grid = two_by_two()
    with unidist.ModelParallel(grid, unidist.LayoutMap(grid, {".*a/kernel": (None, "model")})).scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    seen = {}
    original = layers.Dropout.call

    def watched(self, inputs, training=False):
        from unidist.keras.torch.context import frame

        out = original(self, inputs, training=training)
        if frame() is not None and training:
            seen[frame().rank] = out.detach().numpy() != 0
        return out

    watched.__module__ = original.__module__  # known to treat each row alone
    layers.Dropout.call = watched
    try:
        model.fit(np.ones((8, 12), "float32"), np.ones((8, 16), "float32"), batch_size=8, verbose=0)
    finally:
        layers.Dropout.call = original
    assert sorted(seen) == [0, 1, 2, 3]
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[2], seen[3])
    assert (seen[0] != seen[2]).any()


def test_data_parallel_gradient_bytes_are_the_closed_form():
    x, y = features(rows=8)
    with unidist.ledger() as traffic:
        model = train(mlp, x, y, unidist.DataParallel(), batch_size=8, epochs=3).model
    gradient = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    assert traffic.bytes("all_reduce", purpose="gradient") == 3 * 2 * 3 / 4 * gradient
    assert traffic.count("all_reduce", purpose="gradient") == 3


def test_describe_tells_the_bytes_that_are_held():
    model = train(mlp, *features(), model_parallel(), optimizer=lambda: keras.optimizers.Adam()).model
    table = unidist.describe(model)
    held = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        held[variable.path] = max(p.numel() * p.element_size() for p in variable._storage.shards.values())
    assert {row.path: row.bytes_per_device for row in table.rows} == held
    kernels = {row.path.split("/", 1)[1]: row for row in table.rows if row.path.endswith("kernel")}
    assert kernels["a/kernel"].bytes_per_device == 12 * 16 * 4 // 4
    assert sum("_velocity" in row.path and row.is_sharded for row in table.rows) == 3
    brief, whole = table.show(), table.show(slots=True)
    assert re.search(r"a/kernel +\(12, 16\) +split on dim 1 over model +\(12, 4\) +192\n", brief)
    assert "_velocity" not in brief
    count = len(model.optimizer.variables)
    assert re.search(rf"\nslots \({count} variables of the optimizer\) +{table.bytes_of('slots'):,}\n", brief)
    assert len(whole.splitlines()) == len(brief.splitlines()) + count


def test_saving_writes_the_full_values_and_loads_into_another_mesh(tmp_path, strategy):
    x, y = features()
    trained = train(mlp, x, y, strategy)
    trained.model.save(tmp_path / "model.keras")
    trained.model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(plain.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    with model_parallel(PAIR, unidist.Mesh({"model": 2, "data": 2})).scope():
        other = mlp()
        other.load_weights(tmp_path / "model.weights.h5")
    for a, b in zip(other.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    assert unidist.describe(other).sharded


def test_a_model_is_distributed_once():
    model = train(mlp, *features(), model_parallel()).model
    with pytest.raises(unidist.LayoutError, match=r"distributed over .* already"):
        unidist.parallelize(model, unidist.DataParallel())


def test_validation_and_early_stopping_decide_as_on_one_device(strategy):
    x, y = features(rows=14)
    held = features(rows=5, seed=3)

    def run(given):
        stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
        rate = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=0.05)
        return train(
            mlp, x, y, given, epochs=8, validation_data=held, callbacks_too=[stop, rate], compiled={"loss": "mse"}
        )

    found, wanted = run(strategy), run(None)
    assert_equal(found, wanted)
    assert len(found.history["val_loss"]) == len(wanted.history["val_loss"])


def test_one_tensor_goes_to_kernels_that_two_axes_cut():
    def build():
        inputs = layers.Input((12,))
        shared = layers.Dense(8, name="shared")(inputs)
        branches = [layers.Dense(6, name=name)(shared) for name in ("a", "b")]
        return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(branches)))

    grid = unidist.Mesh({"data": 1, "columns": 2, "others": 2})
    rules = unidist.LayoutMap(grid, {".*a/kernel": (None, "columns"), ".*b/kernel": (None, "others")})
    x, y = features()
    assert_equal(train(build, x, y, unidist.ModelParallel(grid, rules)), train(build, x, y))


def test_train_test_and_predict_on_batch(strategy):
    x, y = features(rows=6)

    def run(given):
        keras.utils.set_random_seed(1)
        with given.scope() if given is not None else contextlib.nullcontext():
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss="mse", metrics=["mae"])
            return [
                *(model.train_on_batch(x, y) for _ in range(3)),
                model.test_on_batch(x, y),
                model.predict_on_batch(x),
                keras.ops.convert_to_numpy(model(x)),
            ]

    for a, b in zip(run(strategy), run(None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["GlorotUniform", "RandomUniform", "TruncatedNormal", "HeNormal", "RandomNormal"])
@pytest.mark.parametrize("shape", [(300, 301), (65537, 1), (65551,)])
def test_initial_values_are_those_of_one_device(name, shape):
    make = getattr(keras.initializers, name)
    with unidist.DataParallel().scope():
        found = make(seed=3)(shape)
    np.testing.assert_array_equal(found.numpy(), make(seed=3)(shape).numpy())


@pytest.mark.parametrize(("verbose", "reductions"), [(0, 0), (2, 0), (1, 3 * 2)])
def test_metrics_are_summed_only_where_somebody_reads_them(verbose, reductions, capsys):
    x, y = features()
    histories = []
    for strategy in (None, unidist.DataParallel()):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = mlp()
            model.compile("sgd", loss="mse", metrics=["mae"])
            with unidist.ledger() as traffic:
                history = model.fit(x, y, batch_size=4, epochs=2, verbose=verbose)
        histories.append(history.history)
    # The simulator's main thread reads an epoch's sums without a collective.
    assert traffic.count(purpose="metrics") == reductions
    for name in histories[0]:
        np.testing.assert_allclose(histories[1][name], histories[0][name], atol=1e-5)
