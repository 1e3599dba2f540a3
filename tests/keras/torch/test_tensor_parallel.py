"""TensorParallelKeras: a model in, the same model sharded, equal to one device; what it says is measured."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import unidist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 16)).astype("float32")
Y = RNG.normal(size=(20, 4)).astype("float32")


class Own(keras.Model):  # type: ignore[misc]
    """A subclassed model with a loss of its own."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.up = keras.layers.Dense(64, "relu", name="up")
        self.down = keras.layers.Dense(4, name="down")

    def call(self, x):
        return self.down(self.up(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight, training)


def functional() -> keras.Model:
    x = keras.Input((16,))
    y = keras.layers.Dense(64, "relu", name="up")(x)
    return keras.Model(x, keras.layers.Dense(4, name="down")(y), name="net")


def subclassed() -> keras.Model:
    model = Own()
    model(np.zeros((1, 16), "float32"))
    return model


def trained(build, parallel: bool):
    keras.utils.set_random_seed(4)
    model = build()
    if parallel:
        model = unidist.TensorParallelKeras(model, world_size=4, distributed_backend="fallback")
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model, history.history


@pytest.mark.parametrize("build", [functional, subclassed])
def test_it_trains_evaluates_predicts_and_saves_as_on_one_device(build, tmp_path) -> None:
    with unidist.ledger() as traffic:
        found, history = trained(build, parallel=True)
    wanted, expected = trained(build, parallel=False)
    assert traffic.count("all_reduce") > 0
    assert isinstance(found, keras.Model)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-5, rtol=1e-5)
    for a, b in zip(found.evaluate(X, Y, verbose=0), wanted.evaluate(X, Y, verbose=0), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    np.testing.assert_allclose(found.predict(X, verbose=0), wanted.predict(X, verbose=0), atol=1e-5)
    for a, b in zip(found.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    lines: list[str] = []
    found.summary(print_fn=lines.append)
    assert f"{wanted.count_params():,}" in "".join(lines)
    # What is saved is the model, without a trace of devices.
    found.save_weights(tmp_path / "w.weights.h5")
    again = build()
    again.load_weights(tmp_path / "w.weights.h5")
    for a, b in zip(again.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_whole_model_is_saved_and_loads_as_the_plain_one(tmp_path) -> None:
    found, _ = trained(functional, parallel=True)
    found.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert again.name == "net"
    assert type(again).__name__ == "Functional"
    np.testing.assert_allclose(again.predict(X, verbose=0), found.predict(X, verbose=0), atol=1e-5)


def test_its_figures_are_those_of_the_arrays() -> None:
    found, _ = trained(functional, parallel=True)
    info = found.get_parallelism_info()
    held = 4 * (16 * 64 // 4 + 64 // 4 + 64 * 4 // 4 + 4)
    whole = 4 * (16 * 64 + 64 + 64 * 4 + 4)
    assert info["bytes_per_device"] == held
    assert info["bytes_on_one_device"] == whole
    assert info["sharded_fraction"] == pytest.approx(1 - 4 * 4 / whole)
    assert (info["backend"], info["world_size"], info["mesh"]) == ("sim", 4, {"model": 4})
    assert len(info["devices"]) == 4
    assert info["layouts"]["up/kernel"] == "Layout(None, 'model')"
    slots = found.get_gradient_sharding_info()
    assert (slots["sharded_gradients"], slots["replicated_gradients"]) == (3, 1)
    assert (slots["gradient_bytes_per_device"], slots["gradient_bytes_on_one_device"]) == (held, whole)
    # Adam's two slots, its iteration and its learning rate.
    assert 0 <= slots["optimizer_bytes_per_device"] - 2 * held <= 16
    shards = [v._storage.shards for v in found.model.weights]
    assert sum(next(iter(s.values())).nbytes for s in shards) == held


@pytest.mark.parametrize("name", ["sim", "fallback", "auto"])
def test_names_of_backends(name: str) -> None:
    unidist.use("sim", devices=2)
    found = unidist.TensorParallelKeras(functional(), distributed_backend=name)
    assert found.get_parallelism_info()["backend"] == "sim"
    assert found.get_parallelism_info()["world_size"] == 2


def test_devices_by_number_and_name() -> None:
    unidist.use("sim", devices=4)
    names = unidist.list_devices()
    found = unidist.TensorParallelKeras(functional(), device_ids=[3, names[1], 0, 2])
    assert found.get_parallelism_info()["devices"] == [names[k] for k in (3, 1, 0, 2)]


def test_what_does_not_fit_is_refused() -> None:
    unidist.use("sim", devices=2)
    with pytest.raises(unidist.MeshError, match="world_size=3, but there are 2 devices"):
        unidist.TensorParallelKeras(functional(), world_size=3)
    with pytest.raises(unidist.MeshError, match="at least 1"):
        unidist.TensorParallelKeras(functional(), world_size=0)
    with pytest.raises(unidist.MeshError, match="device_ids names 'gpu:9'"):
        unidist.TensorParallelKeras(functional(), device_ids=["gpu:9"])
    with pytest.raises(unidist.BackendNotAvailableError):
        unidist.TensorParallelKeras(functional(), distributed_backend="nothing")
    with pytest.raises(unidist.LayoutError, match="not built"):
        unidist.TensorParallelKeras(keras.Sequential([keras.layers.Dense(2)]))
