"""What layers keep beside their variables, in one process on torch: what comes along, and what is refused.

Vocabularies that `adapt` has learned need TensorFlow: tests/parity/test_keeping.py.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import torch

import unidist
from unidist.checkpoint import assets
from unidist.errors import CheckpointError
from unidist.keras.checkpoint import api as checkpoints
from unidist.keras.checkpoint import layer_assets

X = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")


class Noting(keras.layers.Layer):  # type: ignore[misc]
    """A layer that saves a text."""

    def __init__(self, text: str, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.text, self.loads = text, 0

    def call(self, x: Any) -> Any:
        return x

    def save_assets(self, folder: str) -> None:
        (Path(folder) / "text").write_text(self.text)

    def load_assets(self, folder: str) -> None:
        self.text = (Path(folder) / "text").read_text()
        self.loads += 1


def net(*layers: Any, alone: bool = False) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if alone else unidist.DataParallel(unidist.Mesh({"data": 4}), zero=1).scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2, name="down")], name="net")
        model.compile("adam", "mse")
    return model


def bins(rows: Any) -> Any:
    layer = keras.layers.Discretization(num_bins=4, name="bins")
    if rows is not None:
        layer.update_state(rows)
        layer.finalize_state()
    return layer


def module(start: float) -> Any:
    inner = torch.nn.BatchNorm1d(4)
    inner.running_mean += start
    inner.num_batches_tracked += int(start)
    return keras.layers.TorchModuleWrapper(inner, name="norm")


def test_bins_come_along_and_stay_where_there_are_none(tmp_path: Path) -> None:
    unidist.save(net(bins(np.arange(100.0))), tmp_path / "some", step=1)
    unidist.save(net(bins(None)), tmp_path / "none", step=1)
    model = net(bins(np.arange(100.0) * 3))
    own = model.layers[0]
    learned = list(own.bin_boundaries)
    with pytest.raises(CheckpointError, match="bins: its files and arrays are in the model alone"):
        unidist.restore(model, tmp_path / "none")
    assert unidist.restore(model, tmp_path / "none", strict=False).skipped
    assert own.bin_boundaries == learned
    for _ in range(2):
        unidist.restore(model, tmp_path / "some")
        assert own.bin_boundaries == bins(np.arange(100.0)).bin_boundaries
    # One that is made of a config has its bins and no summary: it must not learn of nothing.
    made = keras.layers.Discretization.from_config(bins(np.arange(50.0)).get_config())
    unidist.restore(model := net(made), tmp_path / "none", strict=False)
    assert model.layers[0].bin_boundaries == bins(np.arange(50.0)).bin_boundaries


def test_buffers_of_modules_come_along(tmp_path: Path) -> None:
    model = net(module(3.0), alone=True)
    unidist.save(model, tmp_path, step=1)
    other = net(module(0.0), alone=True)
    unidist.restore(other, tmp_path)
    found = other.layers[0].module
    np.testing.assert_array_equal(found.running_mean.numpy(), np.full(4, 3.0, "float32"))
    assert int(found.num_batches_tracked) == 3
    plain = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(4, track_running_stats=False), name="norm")
    with pytest.raises(CheckpointError, match=r"norm: has the buffers \{\} in the model and \{'num_batches"):
        unidist.restore(net(plain, alone=True), tmp_path)


def test_a_training_goes_on_with_the_buffers_that_it_had(tmp_path: Path) -> None:
    """As one that was not interrupted."""

    def run(epochs: int) -> Any:
        model = net(module(0.0), alone=True)
        checkpoint = unidist.Checkpoint(tmp_path)
        model.fit(X, X[:, :2], batch_size=16, epochs=epochs, shuffle=False, callbacks=[checkpoint], verbose=0)
        return model

    run(1)
    found = run(2)
    alone = net(module(0.0), alone=True)
    alone.fit(X, X[:, :2], batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert float(found.layers[0].module.running_mean.abs().sum()) > 1e-3
    for name, value in alone.layers[0].module.state_dict().items():
        np.testing.assert_allclose(found.layers[0].module.state_dict()[name], value, atol=1e-6, err_msg=name)


def test_all_or_nothing_is_taken_and_what_is_left_is_named(tmp_path: Path) -> None:
    unidist.save(net(Noting("first", name="one"), Noting("second", name="two")), tmp_path, step=1)
    other = net(Noting("own", name="one"), Noting("own", name="three"))
    kernel = np.asarray(other.layers[-1].kernel)
    other.layers[-1].kernel.assign(kernel + 1)
    with pytest.raises(CheckpointError) as raised:
        unidist.restore(other, tmp_path)
    assert "- two: its files and arrays are in the checkpoint alone" in str(raised.value)
    assert "- three: its files and arrays are in the model alone" in str(raised.value)
    assert other.layers[0].text == "own"
    np.testing.assert_array_equal(np.asarray(other.layers[-1].kernel), kernel + 1)
    found = unidist.restore(other, tmp_path, strict=False)
    assert [line.partition(":")[0] for line in found.skipped] == ["three", "two"]
    assert [layer.text for layer in other.layers[:2]] == ["first", "own"]


def test_layers_within_layers_shared_ones_and_those_beside_a_model(tmp_path: Path) -> None:
    def build(text: str) -> Any:
        shared = Noting(f"{text} shared", name="shared")
        inner = keras.Sequential([keras.Input((4,)), shared, Noting(f"{text} inner", name="same")], name="inner")
        model = net(inner, shared, Noting(f"{text} outer", name="same"))
        model.beside = Noting(f"{text} beside", name="same")
        return model

    def texts(model: Any) -> list[str]:
        inner, shared, outer, _ = model.layers
        return [shared.text, *(layer.text for layer in inner.layers), outer.text, model.beside.text]

    model, other = build("a"), build("b")
    unidist.save(model, tmp_path, step=1)
    unidist.restore(other, tmp_path)
    assert texts(other) == texts(model) == ["a shared", "a shared", "a inner", "a outer", "a beside"]
    # Files that are as they were are not loaded.
    unidist.restore(other, tmp_path)
    assert other.layers[1].loads == 1


def test_a_model_that_is_made_again_takes_them(tmp_path: Path) -> None:
    """Keras has counted its names on."""

    def build(text: str) -> Any:
        model = keras.Sequential([keras.Input((4,)), Noting(f"{text} 0"), Noting(f"{text} 1"), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    keras.utils.clear_session()
    unidist.save(build("a"), tmp_path, step=1)
    other = build("b")
    assert [layer.name for layer in other.layers[:2]] == ["noting_2", "noting_3"]
    unidist.restore(other, tmp_path)
    assert [layer.text for layer in other.layers[:2]] == ["a 0", "a 1"]


def test_steps_of_before_restore_all_but_that_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net(Noting("own", name="note"))
    with mock.patch.object(layer_assets, "keepers", return_value=[]), mock.patch.object(checkpoints, "_KEPT", "before"):
        unidist.save(model, tmp_path, step=1)
    other = net(Noting("other", name="note"))
    found = unidist.restore(other, tmp_path)
    assert other.layers[0].text == "other"
    assert [line.partition(":")[0] for line in found.skipped] == ["note"]
    assert "these layers stay as they are: note" in caplog.text


class Failing(Noting):
    def save_assets(self, folder: str) -> None:
        raise RuntimeError("nothing is there")


class Linking(Noting):
    def save_assets(self, folder: str) -> None:
        (Path(folder) / "text").symlink_to("/etc/passwd")


class Odd(keras.layers.Layer):  # type: ignore[misc]
    def save_own_variables(self, store: Any) -> None:
        store["text"] = "words"

    def call(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: Failing("", name="note"), r"layer 'note' \(Failing\) could not save its files: RuntimeError: nothing"),
        (lambda: Linking("", name="note"), "a layer wrote a link"),
        (lambda: Odd(name="note"), "'note//own/text' has the dtype '<U5'"),
    ],
)
def test_what_cannot_be_saved_is_a_typed_error_and_leaves_nothing(
    layer: Callable[[], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(CheckpointError, match=words):
        unidist.save(net(layer()), tmp_path / "run", step=1)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "temporary").iterdir())


class Refusing(Noting):
    def load_assets(self, folder: str) -> None:
        raise ValueError("not these")


def test_a_layer_that_does_not_take_its_files_is_a_typed_error(tmp_path: Path) -> None:
    unidist.save(net(Noting("a", name="note")), tmp_path, step=1)
    with pytest.raises(CheckpointError, match=r"layer 'note' \(Refusing\) could not take its files: ValueError"):
        unidist.restore(net(Refusing("b", name="note")), tmp_path)


class Given(Noting):
    """As a lookup that is given its vocabulary when it is made."""

    def save_assets(self, folder: str) -> None:
        return


def test_a_layer_that_was_given_its_own_does_not_hide_that_it_keeps_it(tmp_path: Path) -> None:
    unidist.save(net(Noting("a", name="note")), tmp_path, step=1)
    with pytest.raises(CheckpointError, match="note: has files in the checkpoint, and the layer has what the program"):
        unidist.restore(net(Given("b", name="note")), tmp_path)


@pytest.mark.parametrize("path", ["../out", "/out", "in/../../../out"])
def test_files_that_somebody_else_wrote_stay_in_their_folder(path: str, tmp_path: Path) -> None:
    model = net(Noting("a", name="note"))
    with (
        mock.patch.object(assets, "split", return_value=None),
        mock.patch.object(assets, "file_name", lambda layer, name: f"{layer}//assets/{path}"),
    ):
        unidist.save(model, tmp_path / "run", step=1)
    with pytest.raises(CheckpointError, match="names no file within a layer's folder"):
        unidist.restore(model, tmp_path / "run")
    assert not (tmp_path / "out").exists()


def test_a_file_of_numbers_is_refused(tmp_path: Path) -> None:
    model = net(Noting("a", name="note"))
    with mock.patch.object(layer_assets.Keeper, "files", return_value={"text": np.zeros(2)}):
        unidist.save(model, tmp_path, step=1)
    with pytest.raises(CheckpointError, match="is a file of float64"):
        unidist.restore(model, tmp_path)


def test_keras_finds_no_layers_in_what_stands_on_a_layer(tmp_path: Path) -> None:
    """Keras saves and loads what a list on a layer holds: one of ours would be in every file, or never end."""
    rows = np.zeros((4, 4), "float32")
    unidist.use("sim", devices=2)
    with unidist.DataParallel(zero=3).scope():
        own = keras.layers.Lambda(lambda x: x - x.mean())
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), own])
        model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.warns(UserWarning, match="eagerly"):
        model.fit(rows, rows, verbose=0)
    held = [item for layer in model._flatten_layers() for item in vars(layer).items()]
    ours = [one for name, one in held if name.startswith("_unidist")]
    assert len(ours) > 5
    assert not [one for one in ours if _layers_in(one)]
    model.save_weights(tmp_path / "a.weights.h5")
    model.load_weights(tmp_path / "a.weights.h5")


def _layers_in(container: Any) -> list[Any]:
    """The layers that Keras's walk over lists and dicts finds."""
    if isinstance(container, dict):
        container = container.values()
    elif not isinstance(container, list | tuple | set):
        return []
    return [one for one in container if isinstance(one, keras.Layer) or _layers_in(one)]
